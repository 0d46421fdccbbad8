"""PieceBytes: the bytes of a vocabulary's pieces as arrays, so that many tokens are looked at at once.

Legend: V vocabulary, N bytes of all pieces together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

WORD: Final = 8  # bytes of one


class PieceBytes:
    """Of `pieces`, bytes of each token id.

    sizes   int64 [V] bytes of each piece; `longest`: the most of them
    starts  int64 [V + 1] where each piece begins in `text`; piece i ends where i + 1 begins
    text    uint8 [N + longest + 2] all pieces one after another, padded so that no offset into one reaches beyond
    heads   uint64 [V] the first eight bytes of each piece, the first as the highest; 0 where there are none
    tails   uint64 [V] the last eight bytes of each piece, the last as the lowest; 0 where there are none
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
