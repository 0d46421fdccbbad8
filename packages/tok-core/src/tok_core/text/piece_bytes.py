"""Bytes of a vocabulary's pieces as arrays, so that many tokens are looked up at once.

Legend: V vocabulary, N bytes of all pieces together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

WORD: Final = 8  # bytes per word of `heads` and `tails`


class PieceBytes:
    """Bytes of `pieces`, which holds the bytes of each token id.

    sizes   int64 [V] bytes of each piece; `longest`: the largest of them
    starts  int64 [V + 1] where each piece begins in `text`; piece i ends where piece i + 1 begins
    text    uint8 [N + longest + 2] all pieces concatenated, padded so that offsets into a piece stay inside the array
    heads   uint64 [V] the first eight bytes of each piece, the first byte highest; 0 for missing bytes
    tails   uint64 [V] the last eight bytes of each piece, the last byte lowest; 0 for missing bytes
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.sizes: Ints = np.fromiter(map(len, pieces), np.int64, len(pieces))
        self.longest = int(self.sizes.max(initial=0))
        self.starts: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)])
        self.text = np.frombuffer(b"".join(pieces) + bytes(self.longest + 2), np.uint8)
        self.heads: Words = np.zeros(len(pieces), np.uint64)
        self.tails: Words = np.zeros(len(pieces), np.uint64)
        for offset in range(min(WORD, self.longest)):
            ids = (self.sizes > offset).nonzero()[0]
            self.heads[ids] |= self.text[self.starts[ids] + offset].astype(np.uint64) << (8 * (WORD - 1 - offset))
            self.tails[ids] |= self.text[self.starts[ids + 1] - 1 - offset].astype(np.uint64) << (8 * offset)
