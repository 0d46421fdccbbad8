"""Reproduce random prompts from a seed and a length, with the same ids on every machine."""

from __future__ import annotations

import numpy as np

LOW, HIGH = 16, 127_900
"""Ids lie in [LOW, HIGH). None of them is special in a vocabulary of 128 256."""

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def random_ids(seed: int, length: int) -> list[int]:
    """Return ids LOW + mix((seed · 2³² + j + 1) · γ) mod (HIGH − LOW) for j from 0, in 64-bit arithmetic.

    γ and mix are those of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
    """
    first = np.uint64(((seed << 32) + 1) & _MASK)
    z = (np.arange(length, dtype=np.uint64) + first) * _GAMMA  # arrays wrap around silently
    for shift, factor in _MIX:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    ids: list[int] = (z % np.uint64(HIGH - LOW) + np.uint64(LOW)).tolist()
    return ids
