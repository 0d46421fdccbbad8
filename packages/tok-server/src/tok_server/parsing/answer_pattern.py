"""AnswerPattern: where in a text its answer stands, as a client says who is not to be trusted.

Patterns are of RE2's kind, which never backtracks, and small; of texts the last bytes are read. What is left is time
that grows with the text, and with its square only where a pattern that looks far ahead matches everywhere: that has a
limit.
"""

from __future__ import annotations

import time
from typing import Any

import re2

from tok_server.wire import invalid

MAX_PATTERN_CHARS = 512  # characters
MAX_PROGRAM_INSTRUCTIONS = 2048  # instructions; a class of Unicode letters takes about 1200
MEMORY = 1 << 20  # bytes that a pattern may take, compiled and while it is looked for
WINDOW = 1 << 14  # bytes at the end of a text that are read
MAX_SEARCH_SECONDS = 0.5  # for one text
PATTERN = "stop_when.pattern"


class AnswerPattern:
    """A regular expression of one group, which is the answer. Errors: ApiError."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise invalid(PATTERN, f"{PATTERN} has {len(pattern)} characters; allowed: at most {MAX_PATTERN_CHARS}")
        self._found = _compiled(pattern)

    @property
    def size(self) -> int:
        """Instructions of the program that looks for it: with a text's bytes, what that may take."""
        return int(self._found.programsize)

    def answer(self, text: str) -> str | None:
        """The answer in the last match that has one; None: there is none. Errors: ApiError where it takes too long."""
        until = time.monotonic() + MAX_SEARCH_SECONDS
        answer = None
        # A cut may go through a character: the bytes of it that are left match nothing.
        for found in self._found.finditer(text.encode()[-WINDOW:]):
            answer = found[1] if found[1] is not None else answer
            if time.monotonic() > until:
                raise invalid(PATTERN, f"{PATTERN} takes more than {MAX_SEARCH_SECONDS} seconds to find in one text")
        return None if answer is None else answer.decode(errors="replace")


def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MEMORY
    try:
        found = re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode(errors="replace")
        raise invalid(PATTERN, f"{PATTERN} is {pattern!r}; allowed: regular expressions of RE2 ({why})") from error
    if found.groups != 1:
        raise invalid(PATTERN, f"{PATTERN} is {pattern!r}; allowed: one group, (?:…) aside, not {found.groups}")
    if found.programsize > MAX_PROGRAM_INSTRUCTIONS:
        why = f"is {found.programsize} instructions long when compiled; allowed: at most {MAX_PROGRAM_INSTRUCTIONS}"
        raise invalid(PATTERN, f"{PATTERN} {why}")
    return found
