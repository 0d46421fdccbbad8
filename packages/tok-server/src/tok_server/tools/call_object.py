"""CallObject: one call as models write it, `{"name": …, "arguments": {…}}`, understood while it is written.

A call is certain, and told, as soon as the name of a tool and the beginning of an object of arguments have been read;
from then on the arguments are passed on as they come. Up to there the text may still turn out to be no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

from tok_server.tools.json_scan import SPACE, JsonScanner
from tok_server.tools.pieces import Arguments, CallBegin, Piece

ARGUMENTS = ("arguments", "parameters")
IGNORED = ("type", "id")  # what some models add
NO_ARGUMENTS = "{}"
_BORDER = re.compile(r'["\\\x00-\x1f]')  # what ends or means something within a string


class CallObject:
    """Fed until `ended`, or until `feed` answers False: that character cannot be part of a call.

    tools    names of what may be called
    begun    the call has been told
    ended    the object is complete
    """

    def __init__(self, tools: Container[str]) -> None:
        self.begun = False
        self.ended = False
        self._tools = tools
        self._scan = JsonScanner()
        self._member: list[str] = []  # what has been read of a key or of its value
        self._key: str | None = None  # whose value is being read
        self._name: str | None = None
        self._arguments: str | None = None  # complete, where they came before the name or not as an object
        self._passing = False  # the arguments are passed on as they come
        self._passed = False
        self._out: list[Piece] = []

    def taken(self) -> list[Piece]:
        """What has become certain since the last call."""
        out, self._out = self._out, []
        return out

    def run(self, text: str, at: int) -> int:
        """Takes what can be passed on of `text` from `at` on without a look at each character; where that ends."""
        if not self._passing or not self._scan.in_plain_string:
            return at
        found = _BORDER.search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            self._out.append(Arguments(text[at:end]))
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
        if self._passing:
            self._out.append(Arguments(character))
            self._passing = scan.depth > 1
            return True
        if depth != 1 or in_string or character not in ",:}":
            return self._inside(character, depth)
        return self._after_key() if character == ":" else self._after_value(character)

    def _inside(self, character: str, depth: int) -> bool:
        """A character of a key or a value; the beginning of arguments, maybe."""
        first = depth == 1 and character == "{" and self._scan.depth == 2
        if first and self._key in ARGUMENTS and self._name is not None and not self.begun:
            self._begin()
            self._passing = self._passed = True
            self._out.append(Arguments(character))
        elif depth:
            self._member.append(character)
        return True

    def _after_key(self) -> bool:
        self._key = json.loads(self._read())
        return self._key in ("name", *ARGUMENTS, *IGNORED)

    def _after_value(self, character: str) -> bool:
        key, self._key = self._key, None
        if key is not None and not self._take(key, self._read()):
            return False
        if self._name is not None and self._arguments is not None and not self.begun:
            self._begin()
            self._out.append(Arguments(self._arguments))
        if character == "}":
            return self._finish()
        return True

    def _take(self, key: str, value: str) -> bool:
        if key in ARGUMENTS:
            return self._take_arguments(value)
        if key == "name" and self._name is None:
            self._name = json.loads(value) if value.startswith('"') else None
            return self._name is not None and self._name in self._tools
        return key in IGNORED

    def _take_arguments(self, value: str) -> bool:
        """`value` is "" where they have been passed on."""
        if self._arguments is not None or (self._passed and value):
            return False  # there are arguments already
        if value.startswith('"'):  # an object within a string
            value = json.loads(value).strip() or NO_ARGUMENTS
            if not _is_unicode(value):
                return False
        elif value == "null":
            value = NO_ARGUMENTS
        elif value and not value.startswith("{"):
            return False
        self._arguments = value
        return True

    def _finish(self) -> bool:
        if self._name is None:
            return False
        if not self.begun:
            self._begin()
            self._out.append(Arguments(NO_ARGUMENTS))
        self.ended = True
        return True

    def _begin(self) -> None:
        self.begun = True
        self._out.append(CallBegin(str(self._name)))

    def _read(self) -> str:
        text = "".join(self._member).strip(SPACE)
        self._member.clear()
        return text


def _is_unicode(text: str) -> bool:
    """Whether it can be sent: JSON can name halves of UTF-16 pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
