"""Extract the answer from a text with a regular expression of an untrusted client.

RE2 never backtracks, patterns are limited in size, and only the last bytes of a text are searched. The search time is
linear in the text, and quadratic only if a pattern that looks far ahead matches everywhere; a time limit ends that.
"""

from __future__ import annotations

import time
from typing import Any

import re2

from tok_server.wire import invalid

MAX_PATTERN_CHARS = 512  # characters
MAX_PROGRAM_INSTRUCTIONS = 2048  # instructions of a compiled pattern; a class of Unicode letters takes about 1200
MAX_PATTERN_MEMORY_BYTES = 1 << 20  # bytes of memory for a compiled pattern and its search
SEARCHED_TAIL_BYTES = 1 << 14  # bytes at the end of a text that are searched
MAX_SEARCH_SECONDS = 0.5  # seconds per text
PATTERN_FIELD = "stop_when.pattern"


class AnswerPattern:
    """A compiled regular expression whose single group is the answer. Errors: ApiError for an invalid pattern."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise invalid(
                PATTERN_FIELD, f"{PATTERN_FIELD} has {len(pattern)} characters; allowed: at most {MAX_PATTERN_CHARS}"
            )
        self._pattern = _compile(pattern)

    @property
    def size(self) -> int:
        """Return the number of compiled instructions; times a text's bytes, it estimates the work of a search."""
        return int(self._pattern.programsize)

    def answer(self, text: str) -> str | None:
        """Return the answer in the last match that has one, else None. Errors: ApiError if the search is too slow."""
        deadline = time.monotonic() + MAX_SEARCH_SECONDS
        answer = None
        # The cut may split a character: its remaining bytes match nothing.
        for found in self._pattern.finditer(text.encode()[-SEARCHED_TAIL_BYTES:]):
            answer = found[1] if found[1] is not None else answer
            if time.monotonic() > deadline:
                raise invalid(
                    PATTERN_FIELD, f"{PATTERN_FIELD} takes more than {MAX_SEARCH_SECONDS} seconds to search one text"
                )
        return None if answer is None else answer.decode(errors="replace")


def _compile(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_MEMORY_BYTES
    try:
        found = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise invalid(
            PATTERN_FIELD, f"{PATTERN_FIELD} is {pattern!r}; allowed: regular expressions of RE2 ({reason})"
        ) from error
    if found.groups != 1:
        raise invalid(
            PATTERN_FIELD, f"{PATTERN_FIELD} is {pattern!r}; allowed: exactly one capturing group, not {found.groups}"
        )
    if found.programsize > MAX_PROGRAM_INSTRUCTIONS:
        reason = f"compiles to {found.programsize} instructions; allowed: at most {MAX_PROGRAM_INSTRUCTIONS}"
        raise invalid(PATTERN_FIELD, f"{PATTERN_FIELD} {reason}")
    return found
