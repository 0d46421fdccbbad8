"""Limit the structure of a JSON body by scanning its bytes before anything is decoded.

The decoder holds the GIL until a whole body is decoded. Each string, object and array costs it far more than the three
bytes that one takes. Within these limits, a body blocks the event loop for less than 100 ms.
"""

from __future__ import annotations

import numpy as np

from tok_server.wire.errors import ApiError, invalid

MAX_MEMBERS = 70_000  # strings (keys too), objects and arrays: enough for 65,536 text prompts and some more
MAX_VALUES = 1 << 20  # values separated by commas: enough for the token ids of the longest prompts
MAX_NESTING = 128  # levels of nested arrays and objects
PIECE_BYTES = 1 << 18  # bytes scanned together: other threads run in between

QUOTE, BACKSLASH = b'"\\'
# Change of the nesting depth by each byte outside of strings; `COMMA` marks a comma, which does not change it.
COMMA = 2
DEPTH_CHANGE = np.zeros(256, np.int8)
DEPTH_CHANGE[list(b"[{")], DEPTH_CHANGE[list(b"]}")], DEPTH_CHANGE[ord(",")] = 1, -1, COMMA


def check_json(body: bytes) -> None:
    """Raise ApiError (400) for a body with too many members, too many values or too deep nesting."""
    if len(body) > 2 * MAX_MEMBERS or body.count(b"{") + body.count(b"[") > MAX_NESTING:
        _Scan().run(body)


class _Scan:
    """Counter of strings, containers, commas and nesting, piece by piece. For valid JSON, no count is too low."""

    def __init__(self) -> None:
        self._strings = self._containers = self._commas = self._depth = 0
        self._in_string = 0
        self._backslashes = 0  # trailing ones of the pieces so far

    def run(self, body: bytes) -> None:
        """Scan `body`. Errors: ApiError (400)."""
        for start in range(0, len(body), PIECE_BYTES):
            self._scan_piece(np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - start), start))

    def _scan_piece(self, piece: np.ndarray) -> None:
        quotes = self._unescaped_quotes(piece)
        marks = DEPTH_CHANGE[piece].nonzero()[0]
        outside = (np.searchsorted(quotes, marks) + self._in_string) % 2 == 0
        change = DEPTH_CHANGE[piece[marks[outside]]]
        self._strings += len(quotes)  # counts quotes: two per string
        self._in_string = (self._in_string + len(quotes)) % 2
        self._containers += int((change == 1).sum())
        self._commas += int((change == COMMA).sum())
        depth = self._depth + np.where(change == COMMA, 0, change).cumsum(dtype=np.int64)
        if len(depth):
            self._depth = int(depth[-1])
        self._check(int(depth.max(initial=0)))

    def _unescaped_quotes(self, piece: np.ndarray) -> np.ndarray:
        """Return the positions of the quotes that an even number of backslashes precedes."""
        plain = (piece != BACKSLASH).nonzero()[0]
        quotes: np.ndarray = (piece == QUOTE).nonzero()[0]
        if len(plain) < len(piece) or self._backslashes:
            index = np.searchsorted(plain, quotes)
            before = np.where(index > 0, plain[index - 1], -1 - self._backslashes)
            quotes = quotes[(quotes - before) % 2 == 1]
        self._backslashes = len(piece) - 1 - int(plain[-1]) if len(plain) else self._backslashes + len(piece)
        return quotes

    def _check(self, depth: int) -> None:
        if depth > MAX_NESTING:
            raise _too_much(f"more than {MAX_NESTING} arrays and objects within each other", "nested_too_deeply")
        members = self._strings // 2 + self._containers
        if members > MAX_MEMBERS:
            raise _too_much(
                f"more than {MAX_MEMBERS} strings, objects and arrays (keys are strings, too)", "too_many_members"
            )
        if self._commas >= MAX_VALUES:
            raise _too_much(f"more than {MAX_VALUES} values", "too_many_members")


def _too_much(what: str, code: str) -> ApiError:
    return invalid(None, f"the body has {what}", code)
