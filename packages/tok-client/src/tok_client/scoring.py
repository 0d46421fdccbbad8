"""Score several samples of one prompt: pass@k, and majority voting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TypeVar

A = TypeVar("A", bound=Hashable)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, given that c of n samples are right.

    pass@k is the probability that at least one of k samples is right. The estimate is 1 − C(n − c, k) / C(n, k),
    computed as a product of ratios, so that nothing overflows. Source: Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code". ValueError: not 0 ≤ c ≤ n, or not 1 ≤ k ≤ n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c is {c}; allowed: integers from 0 to n ({n})")
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; allowed: integers from 1 to n ({n})")
    if n - c < k:
        return 1.0
    # Two products give the same ratio, one with c factors and one with k; compute the shorter one.
    if c < k:
        return 1.0 - math.prod((n - k - i) / (n - i) for i in range(c))
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def majority(answers: Iterable[A | None]) -> A | None:
    """Return the most frequent answer, of equally frequent ones the first; None if there is no answer.

    None in `answers` stands for a sample without an answer and does not count. Source: Wang et al. 2022,
    "Self-Consistency Improves Chain of Thought Reasoning in Language Models".
    """
    counts = Counter(answer for answer in answers if answer is not None)
    return max(counts, key=counts.__getitem__, default=None)
