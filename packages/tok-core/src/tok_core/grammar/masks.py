"""Masks: which tokens a sequence may draw next, each set kept once, however many sequences have it and how often.

Legend: V vocabulary, W words of a packed set: token t is in it where bit t mod 32 of word t div 32 is set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

MAX_CACHED_MASKS = 1024  # that are known at once: 20 MB, for a vocabulary of 150 000


class Mask(NamedTuple):
    """A set of tokens.

    key    its words as bytes
    words  packed, int32 [W]
    only   the one token in it; −1 for several or none
    none   whether no token is in it
    alike  whether all of its tokens' texts begin with one and the same byte: then more of the text may be settled
    """

    key: bytes
    words: Int32
    only: int
    none: bool
    alike: bool


class MaskCache:
    """Of tokens whose texts begin with these bytes: int16 [V], −1 for those that are no text."""

    def __init__(self, begin: NDArray[np.int16]) -> None:
        self.words = -(-len(begin) // 32)
        self._begin = begin
        # Of the last word, xgrammar (0.2.8) also sets bits that stand for no token.
        self._last = np.uint32((1 << (len(begin) - 32 * (self.words - 1))) - 1).view(np.int32)
        self._known: dict[bytes, Mask] = {}

    def of(self, words: Int32) -> Mask:
        """The mask of packed words, int32 [W]. Raises ValueError for another number of words."""
        if words.shape != (self.words,):
            raise ValueError(f"a set of tokens has {words.size} words; allowed: {self.words}")
        (mask,) = self.of_many(words.reshape(1, -1).copy(), [None])
        return mask

    def of_many(self, words_nW: Int32, likely: Iterable[Mask | None]) -> list[Mask]:
        """The masks of packed words, int32 [n, W], in which bits that stand for no token are cleared.

        `likely`: one for each, which it may well be; to compare takes a quarter of the time of looking it up.
        """
        words_nW[:, -1] &= self._last
        keys = map(np.ndarray.tobytes, words_nW)
        return [
            one if one is not None and one.key == key else self._known.get(key) or self._learn(key)
            for key, one in zip(keys, likely, strict=True)
        ]

    def single(self, token: int) -> Mask:
        """The mask of one token."""
        words = np.zeros(self.words, np.uint32)
        words[token // 32] = 1 << token % 32
        return self.of(words.view(np.int32))

    def _learn(self, key: bytes) -> Mask:
        if len(self._known) >= MAX_CACHED_MASKS:
            self._known.clear()
        tokens = np.unpackbits(np.frombuffer(key, np.uint8), bitorder="little").nonzero()[0]
        begin = self._begin[tokens]
        alike = bool(len(begin) and begin[0] >= 0 and (begin == begin[0]).all())
        only = int(tokens[0]) if len(tokens) == 1 else -1
        mask = self._known[key] = Mask(key, np.frombuffer(key, np.int32), only, not len(tokens), alike)
        return mask
