"""Define `NgramTable`, counts of which token follows which context, and how its entries are packed.

Legend: E entries, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

NO_TOKEN: Final = -1
CONTEXTS: Final = (1, 2, 4, 8)  # lengths of contexts, in tokens: all powers of 2 up to the maximum
MAX_CONTEXT: Final = 8
ENTRY_BITS: Final = 22  # 64 MiB
AGE_TOKENS: Final = 1 << 20  # learned tokens after which all counts are halved

# An entry of `best`, from its highest bits: a count, the token, and a check of the context.
TOKEN_BITS: Final = 20
CHECK_BITS: Final = 20
COUNT_SHIFT: Final = TOKEN_BITS + CHECK_BITS
MAX_COUNT: Final = (1 << 22) - 1

# Odd 64-bit multipliers, as signed numbers: 2 ** 64 / golden ratio (Knuth), and two of splitmix64 (Vigna).
TOKEN_MULTIPLIER: Final = 0x9E3779B97F4A7C15 - (1 << 64)
CONTEXT_MULTIPLIER: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
PAIR_MULTIPLIER: Final = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, slots=True)
class NgramTable:
    """Hash tables of contexts: the last 1, 2, 4 or 8 tokens of a sequence, and the salt of its slot.

    pair_count  int32 [E]  how often a token has followed a context, by the hash of both
    total       int32 [E]  how often any token has followed a context, by the hash of the context
    best        int64 [E]  the token that mostly follows a context; 0: none is known
    salt        int64 [S]  slots of equal salt learn from each other, and from no others

    Counts of contexts or pairs with equal hashes add up, and `best` keeps the one of the highest count. A wrong
    prediction costs time only. All changes are sums and maxima, and `best` takes counts of pairs after all tokens of a
    call are counted. So the order of tokens makes no difference: ranks that learn the same tokens make the same
    predictions.
    """

    BYTES: ClassVar[int] = 16 << ENTRY_BITS
    MAX_VOCAB: ClassVar[int] = 1 << TOKEN_BITS

    pair_count: Tensor
    total: Tensor
    best: Tensor
    salt: Tensor

    @classmethod
    def empty(cls, salt: Tensor, entry_bits: int = ENTRY_BITS) -> NgramTable:
        """Return a table without contexts, on the device of `salt`."""
        pair_count, total = torch.zeros((2, 1 << entry_bits), dtype=torch.int32, device=salt.device)
        return cls(pair_count, total, torch.zeros(1 << entry_bits, dtype=torch.int64, device=salt.device), salt)

    @property
    def mask(self) -> int:
        """Return the number of entries less 1."""
        return len(self.best) - 1

    def age(self) -> None:
        """Halve all counts, so that contexts seen once are forgotten and the table never fills up."""
        self.pair_count.bitwise_right_shift_(1)
        self.total.bitwise_right_shift_(1)
        for best in self.best.chunk(8):  # bounds the memory of `count`
            count = best >> (COUNT_SHIFT + 1)
            best.bitwise_and_((1 << COUNT_SHIFT) - 1).bitwise_or_(count << COUNT_SHIFT).mul_(count > 0)

    def clear(self) -> None:
        """Forget all contexts."""
        for counts in (self.pair_count, self.total, self.best):
            counts.zero_()
