"""Cache the masks of tokens that sequences may sample next; each distinct mask is stored once.

Legend: V vocabulary, W words of a packed set: token t is in the set if bit t mod 32 of word t div 32 is set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

MAX_CACHED_MASKS = 1024  # masks, after which the cache is cleared: 20 MB for a vocabulary of 150 000


class Mask(NamedTuple):
    """A set of tokens.

    key    the words as bytes
    words  packed, int32 [W]
    only   the single token of the set; −1 if it has none or several
    none   whether the set is empty
    alike  whether all of its tokens' texts begin with the same byte: only then can the grammar force more text
    """

    key: bytes
    words: Int32
    only: int
    none: bool
    alike: bool

    def allows(self, token: int) -> bool:
        """Return whether the set has this token, which may be outside of the vocabulary."""
        word, bit = divmod(token, 32)
        return word < len(self.words) and bool(self.words[word] >> bit & 1)


class MaskCache:
    """Masks over one vocabulary. `begin`: first byte of each token's text, int16 [V]; −1 for tokens without text."""

    def __init__(self, begin: NDArray[np.int16]) -> None:
        self.words = -(-len(begin) // 32)
        self._begin = begin
        # In the last word, xgrammar (0.2.8) also sets bits that stand for no token.
        self._last = np.uint32((1 << (len(begin) - 32 * (self.words - 1))) - 1).view(np.int32)
        self._known: dict[bytes, Mask] = {}

    def of(self, words: Int32) -> Mask:
        """Return the mask of packed words, int32 [W]. Raise ValueError for another number of words."""
        if words.shape != (self.words,):
            raise ValueError(f"a set of tokens has {words.size} words; allowed: {self.words}")
        (mask,) = self.of_many(words.reshape(1, -1).copy(), [None])
        return mask

    def of_many(self, words_nW: Int32, likely: Iterable[Mask | None]) -> list[Mask]:
        """Return the masks of packed words, int32 [n, W]. Clear bits that stand for no token, in place.

        `likely` is a guess for each row, or None. Comparing with the guess takes a quarter of the time of a lookup.
        """
        words_nW[:, -1] &= self._last
        keys = map(np.ndarray.tobytes, words_nW)
        return [
            one if one is not None and one.key == key else self._known.get(key) or self._learn(key)
            for key, one in zip(keys, likely, strict=True)
        ]

    def single(self, token: int) -> Mask:
        """Return the mask of one token."""
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
