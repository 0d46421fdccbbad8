"""Check one JSON value character by character; each is accepted or rejected as soon as it is read.

The syntax is RFC 8259's, except that strings may hold control characters: models write them, and the caller may escape
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

SPACE = " \t\r\n"

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


class JsonScanner:
    """Incremental checker of one JSON value. Feed nothing more once `feed` has returned False, or `done` is set.

    depth      number of open arrays and objects
    in_string  the next character belongs to a string
    done       the value has ended; known for arrays, objects, strings and literals, not for numbers
    """

    def __init__(self) -> None:
        self.done = False
        self._closers: list[str] = []
        self._state: Callable[[str], bool] = self._value
        self._is_key = False
        self._digits = ""  # of the number so far
        self._rest = ""  # of the literal, still to come
        self._hex = 0  # digits of \uXXXX still to come

    @property
    def depth(self) -> int:
        return len(self._closers)

    @property
    def in_plain_string(self) -> bool:
        """Return whether any character but a quote or a backslash continues the current string."""
        return self._state == self._string

    @property
    def in_string(self) -> bool:
        return self._state in (self._string, self._escape, self._escape_hex)

    def feed(self, character: str) -> bool:
        """Consume `character`; return whether the value can continue with it."""
        return self._state(character)

    def _value(self, character: str) -> bool:
        if character in SPACE:
            return True
        if character == "{":
            self._open("}", self._first_key)
        elif character == "[":
            self._open("]", self._first_item)
        elif character == '"':
            self._begin_string(is_key=False)
        elif character in "-0123456789":
            self._digits, self._state = character, self._number
        elif character in _LITERALS:
            self._rest, self._state = _LITERALS[character], self._literal
        else:
            return False
        return True

    def _open(self, closer: str, state: Callable[[str], bool]) -> None:
        self._closers.append(closer)
        self._state = state

    def _begin_string(self, *, is_key: bool) -> None:
        self._is_key, self._state = is_key, self._string

    def _first_item(self, character: str) -> bool:
        return self._close() if character == "]" else self._value(character)

    def _first_key(self, character: str) -> bool:
        return self._close() if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._begin_string(is_key=True)
        return character == '"' or character in SPACE

    def _string(self, character: str) -> bool:
        if character == "\\":
            self._state = self._escape
        elif character == '"':
            if self._is_key:
                self._state = self._colon
            else:
                self._end()
        return True

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._hex, self._state = 4, self._escape_hex
            return True
        self._state = self._string
        return character in '"\\/bfnrt'

    def _escape_hex(self, character: str) -> bool:
        self._hex -= 1
        if not self._hex:
            self._state = self._string
        return character in "0123456789abcdefABCDEF"

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._state = self._value
        return character == ":" or character in SPACE

    def _number(self, character: str) -> bool:
        if character in "+-.eE0123456789":
            self._digits += character
            return True
        if not _NUMBER.fullmatch(self._digits):
            return False
        self._end()
        return self._state(character)

    def _literal(self, character: str) -> bool:
        if character != self._rest[0]:
            return False
        self._rest = self._rest[1:]
        if not self._rest:
            self._end()
        return True

    def _after_value(self, character: str) -> bool:
        if character == self._closers[-1]:
            return self._close()
        if character == ",":
            self._state = self._key if self._closers[-1] == "}" else self._value
        return character == "," or character in SPACE

    def _close(self) -> bool:
        self._closers.pop()
        self._end()
        return True

    def _end(self) -> None:
        """Handle the end of a value: an element of a container, or the whole value."""
        self.done = not self._closers
        self._state = self._reject if self.done else self._after_value

    def _reject(self, character: str) -> bool:
        return False
