"""Generate random numbers by Philox, a counter-based generator: each number depends on its row's key only."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Compute Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    A word is an unsigned 32-bit number in an int64 tensor. The words of counter, key and result have one shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_64(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply_64(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed_R: Tensor, sample_R: Tensor, position_R: Tensor) -> Tensor:
    """Return the first uniform number of each row, which selects its token."""
    return uniforms(seed_R, sample_R, position_R)[0]


def uniforms(seed_R: Tensor, sample_R: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return two uniform numbers in [0, 1) per row, float64 with 53 random bits, from int64 seed, sample and position.

    The first number selects the token. The second selects another token if filters remove the first. The key is the
    seed (64 bits), and the counter is (sample, position, 0, 0) modulo 2³².
    """
    zero = torch.zeros_like(seed_R)
    counter = (sample_R & _MASK, position_R & _MASK, zero, zero)
    words = philox4x32(counter, (seed_R & _MASK, (seed_R >> 32) & _MASK))
    return _unit_interval(words[0], words[1]), _unit_interval(words[2], words[3])


def _unit_interval(high: Tensor, low: Tensor) -> Tensor:
    """Return the float64 numbers in [0, 1) whose 53 bits are the upper bits of two 32-bit words."""
    return (((high >> 5) << 26) + (low >> 6)).to(torch.float64) * 2.0**-53


def _multiply_64(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a product of two 32-bit words."""
    # int64 products wrap modulo 2⁶⁴, which keeps all bits. The mask removes the sign bits that the shift copies.
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK
