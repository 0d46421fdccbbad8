"""EndingIndex: which tokens can complete a given string, found without looking at each token in turn.

A token can complete `stop` if its piece holds `stop` whole, or if a beginning of the piece is an end of
`stop`. All pieces lie one after another in one byte array, in which positions are filtered byte by byte; few
survive the first two bytes, whatever the vocabulary's size V.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class EndingIndex:
    """Over `pieces`, bytes of each token id.

    starts   [V + 1] where each piece begins in `text`; piece i ends where i + 1 begins
    text     bytes of all pieces, padded so that no offset into a piece reaches beyond
    by_head  [V] ids, sorted by the first two bytes of their pieces; `heads`: these, as big-endian numbers
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._lengths: Ints = np.fromiter(map(len, pieces), np.int64, len(pieces))
        self._longest = int(self._lengths.max(initial=0))
        self._starts: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths)])
        self._text = np.frombuffer(b"".join(pieces) + bytes(self._longest + 2), np.uint8)
        heads = self._two_bytes()
        self._by_head: Ints = np.argsort(heads, kind="stable")
        self._heads: Ints = heads[self._by_head].astype(np.int64)

    def completing(self, stop: bytes) -> Ints:
        """Ids, ascending, of the tokens within which an occurrence of `stop` can end. Exact."""
        can = np.zeros(len(self._lengths), np.bool_)
        can[self._holding(stop)] = True
        for count in range(1, min(len(stop) - 1, self._longest) + 1):
            can[self._beginning_with(stop[len(stop) - count :])] = True
        return np.flatnonzero(can)

    def _holding(self, stop: bytes) -> Ints:
        """Ids of the pieces in which `stop` occurs."""
        if len(stop) > self._longest:
            return np.zeros(0, np.int64)
        at: Ints = np.flatnonzero(self._text[: self._starts[-1]] == stop[0])
        for offset, byte in enumerate(stop[1:], 1):
            at = at[self._text[at + offset] == byte]
        owner: Ints = np.searchsorted(self._starts, at, side="right") - 1
        return owner[at + len(stop) <= self._starts[owner + 1]]

    def _beginning_with(self, text: bytes) -> Ints:
        """Ids of the pieces that begin with `text`."""
        low, high = text[0] << 8, text[0] << 8 | 0xFF
        if len(text) > 1:
            low = high = low | text[1]
        first, last = np.searchsorted(self._heads, [low, high + 1])
        ids = self._by_head[first:last]
        ids = ids[self._lengths[ids] >= len(text)]
        for offset, byte in enumerate(text[2:], 2):
            ids = ids[self._text[self._starts[ids] + offset] == byte]
        return ids

    def _two_bytes(self) -> npt.NDArray[np.uint16]:
        # Absent bytes count as 0; `_beginning_with` looks at the lengths as well.
        starts = self._starts[:-1]
        first = np.where(self._lengths > 0, self._text[starts], 0)
        second = np.where(self._lengths > 1, self._text[starts + 1], 0)
        heads: Ints = first.astype(np.int64) << 8 | second
        return heads.astype(np.uint16)  # NumPy sorts 16-bit numbers by radix
