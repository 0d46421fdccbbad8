"""CallObject: one call as models write it, `{"name": …, "arguments": {…}}`, checked while it is read.

A text is a call only once the whole object has been read: the name of a tool, and arguments that are a JSON object.
Until then it may turn out to be content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

from tok_server.parsing.json_scan import SPACE, JsonScanner

ARGUMENTS = ("arguments", "parameters")
IGNORED = ("type", "id")  # members that some models add
NO_ARGUMENTS = "{}"
_BORDER = re.compile(r'["\\\x00-\x1f]')  # a character that ends a string, or means something in it


class CallObject:
    """Fed until `ended`, or until `feed` answers False: that character cannot be part of a call.

    tools      names of what may be called
    ended      the object is complete, and a call
    name       of the tool, once known
    arguments  a JSON object as text, once known
    """

    def __init__(self, tools: Container[str]) -> None:
        self.ended = False
        self.name: str | None = None
        self.arguments: str | None = None
        self._tools = tools
        self._scan = JsonScanner()
        self._member: list[str] = []  # read so far of a key or of its value
        self._key: str | None = None  # whose value is being read

    def run(self, text: str, at: int) -> int:
        """Take the part of a string in `text` from `at` on that needs no look at each character; return its end."""
        if not self._scan.in_plain_string:
            return at
        found = _BORDER.search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            self._member.append(text[at:end])
        return end

    def feed(self, character: str) -> bool:
        """Whether the object, up to this character, can be a call."""
        scan = self._scan
        depth, in_string = scan.depth, scan.in_string
        if not depth and character != "{" and character not in SPACE:
            return False
        if not scan.feed(character):
            return False
        if in_string and character < " ":
            character = json.dumps(character)[1:-1]
        if depth != 1 or in_string or character not in ",:}":
            if depth:
                self._member.append(character)
            return True
        return self._after_key() if character == ":" else self._after_value(character)

    def _after_key(self) -> bool:
        self._key = json.loads(self._read())
        return self._key in ("name", *ARGUMENTS, *IGNORED)

    def _after_value(self, character: str) -> bool:
        key, self._key = self._key, None
        if key is not None and not self._take(key, self._read()):
            return False
        if character != "}":
            return True
        if self.arguments is None:
            self.arguments = NO_ARGUMENTS
        self.ended = self.name is not None
        return self.ended

    def _take(self, key: str, value: str) -> bool:
        if key in ARGUMENTS:
            return self._take_arguments(value)
        if key == "name" and self.name is None:
            self.name = json.loads(value) if value.startswith('"') else None
            return self.name is not None and self.name in self._tools
        return key in IGNORED

    def _take_arguments(self, value: str) -> bool:
        if self.arguments is not None:
            return False  # there are arguments already
        if value.startswith('"'):  # an object within a string
            value = json.loads(value).strip() or NO_ARGUMENTS
        elif value == "null":
            value = NO_ARGUMENTS
        self.arguments = value
        return _is_object(value)

    def _read(self) -> str:
        text = "".join(self._member).strip(SPACE)
        self._member.clear()
        return text


def _is_object(text: str) -> bool:
    """Whether a client that parses the text as JSON gets an object."""
    try:
        text.encode()  # JSON can name halves of UTF-16 pairs, which cannot be sent
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
