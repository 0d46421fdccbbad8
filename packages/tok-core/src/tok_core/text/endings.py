"""Find the tokens that can complete a given string without checking each token in turn.

A token can complete `stop` if its piece contains `stop`, or if a prefix of the piece is a suffix of `stop`. Both
lookups use an index by two bytes, then filter the candidates byte by byte. Few candidates remain after the index,
whatever the vocabulary size V.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tok_core.text.piece_bytes import WORD, Ints, PieceBytes

MAX_SPANNING_BYTES: Final = WORD - 1  # of a string, in the token that completes it: one byte before is compared, too
NO_IDS: Final[Ints] = np.zeros(0, np.int64)  # no ids


class CompletingTokens(NamedTuple):
    """Ids of the tokens in which an occurrence of a string can end; unordered, some repeated.

    within    the piece contains the string, or begins with more than its last MAX_SPANNING_BYTES bytes
    spanning  the piece begins with at most MAX_SPANNING_BYTES of the string's last bytes; the others precede the token
    """

    within: Ints
    spanning: Ints


class EndingIndex:
    """Index over the pieces of a vocabulary, by two bytes. Legend: N bytes of all pieces.

    places   [N] positions in the pieces' text, sorted by the two bytes that stand there; `place_of`: where the
             positions of each pair of bytes begin
    owner    [N] id of the piece that contains each position
    by_head  [V] ids, sorted by the first two bytes of their pieces; `head_of`: where the ids of each pair begin
    """

    def __init__(self, pieces: PieceBytes) -> None:
        self._pieces = pieces
        size = int(pieces.starts[-1])
        first, second = (pieces.text[shift : size + shift].astype(np.uint16) for shift in (0, 1))
        self._places, self._place_of = _sorted(first << np.uint16(8) | second)
        self._owner = np.repeat(np.arange(len(pieces.sizes), dtype=np.int32), pieces.sizes)
        self._by_head, self._head_of = _sorted((pieces.heads >> np.uint64(48)).astype(np.uint16))

    def completing(self, stop: bytes) -> CompletingTokens:
        """Return the tokens that can complete `stop`, which has at least one byte. Exact."""
        within, spanning = [self._holding(stop)], [NO_IDS]
        for count in range(1, min(len(stop) - 1, self._pieces.longest) + 1):
            ids = self._beginning_with(stop[len(stop) - count :])
            (spanning if count <= MAX_SPANNING_BYTES else within).append(ids)
        return CompletingTokens(np.concatenate(within), np.concatenate(spanning))

    def _holding(self, stop: bytes) -> Ints:
        """Return the ids of the pieces that contain `stop`."""
        text, starts = self._pieces.text, self._pieces.starts
        if len(stop) > self._pieces.longest:
            return NO_IDS
        at = self._places[_range(self._place_of, stop)]
        for offset, byte in enumerate(stop[2:], 2):
            at = at[text[at + offset] == byte]
            if not len(at):
                break
        owner = self._owner[at].astype(np.int64)
        found: Ints = owner[at + len(stop) <= starts[owner + 1]]
        return found

    def _beginning_with(self, text: bytes) -> Ints:
        """Return the ids of the pieces that begin with `text`."""
        ids = self._by_head[_range(self._head_of, text)].astype(np.int64)
        # A piece of one byte is sorted as if a byte 0 followed.
        ids = ids[self._pieces.sizes[ids] >= len(text)]
        for offset, byte in enumerate(text[2:], 2):
            if not len(ids):
                break
            ids = ids[self._pieces.text[self._pieces.starts[ids] + offset] == byte]
        return ids


def _sorted(pairs: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.int32], Ints]:
    """Return the indices of `pairs` in the order of their values, and where each of the 65,536 values begins there."""
    order = np.argsort(pairs, kind="stable").astype(np.int32)  # NumPy sorts 16-bit numbers by radix
    counts = np.bincount(pairs, minlength=1 << 16)
    return order, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _range(begins: Ints, text: bytes) -> slice:
    """Return the slice of an order that holds the entries with the first two bytes of `text`, or with its only byte."""
    low, high = text[0] << 8, (text[0] + 1) << 8
    if len(text) > 1:
        low, high = low | text[1], (low | text[1]) + 1
    return slice(int(begins[low]), int(begins[high]))
