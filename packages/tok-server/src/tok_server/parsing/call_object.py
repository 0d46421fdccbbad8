"""Parse one tool call, `{"name": …, "arguments": {…}}`, and check it while it is read.

A text is a call only once the whole object has been read: the name of a tool, and arguments that are a JSON object.
Until then the text may turn out to be content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

from tok_server.parsing.json_scan import SPACE, JsonScanner

ARGUMENTS = ("arguments", "parameters")
IGNORED = ("type", "id")  # members that some models add
NO_ARGUMENTS = "{}"
_STRING_BREAK = re.compile(r'["\\\x00-\x1f]')  # a character that ends a string, or has a special meaning in it


class CallObject:
    """Incremental parser of one call. Feed it until `ended`, or until `feed` returns False.

    tools      names of the tools that may be called
    ended      the object is complete, and a call
    name       the tool's name, once known
    arguments  a JSON object as text, once known
    """

    def __init__(self, tools: Container[str]) -> None:
        self.ended = False
        self.name: str | None = None
        self.arguments: str | None = None
        self._tools = tools
        self._scan = JsonScanner()
        self._member: list[str] = []  # text so far of a key or of its value
        self._key: str | None = None  # key whose value is being read

    def skip_plain_text(self, text: str, at: int) -> int:
        """Consume the part of a string in `text` from `at` on that needs no check of each character; return its end."""
        if not self._scan.in_plain_string:
            return at
        found = _STRING_BREAK.search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            self._member.append(text[at:end])
        return end

    def feed(self, character: str) -> bool:
        """Consume a character; return whether the object up to it can be a call."""
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
        self._key = json.loads(self._pop_member())
        return self._key in ("name", *ARGUMENTS, *IGNORED)

    def _after_value(self, character: str) -> bool:
        key, self._key = self._key, None
        if key is not None and not self._set_member(key, self._pop_member()):
            return False
        if character != "}":
            return True
        if self.arguments is None:
            self.arguments = NO_ARGUMENTS
        self.ended = self.name is not None
        return self.ended

    def _set_member(self, key: str, value: str) -> bool:
        if key in ARGUMENTS:
            return self._set_arguments(value)
        if key == "name" and self.name is None:
            self.name = json.loads(value) if value.startswith('"') else None
            return self.name is not None and self.name in self._tools
        return key in IGNORED

    def _set_arguments(self, value: str) -> bool:
        if self.arguments is not None:
            return False  # a second member with arguments
        if value.startswith('"'):  # an object encoded as a string
            value = json.loads(value).strip() or NO_ARGUMENTS
        elif value == "null":
            value = NO_ARGUMENTS
        self.arguments = value
        return _is_object(value)

    def _pop_member(self) -> str:
        text = "".join(self._member).strip(SPACE)
        self._member.clear()
        return text


def _is_object(text: str) -> bool:
    """Return whether a client that parses the text as JSON gets an object."""
    try:
        text.encode()  # JSON escapes can yield lone surrogates, which cannot be sent
        return isinstance(json.loads(text, parse_constant=_reject_constant), dict)
    except (ValueError, RecursionError):
        return False


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
