"""Adapt the number of pages kept free so that only a small share of tokens is recomputed after preemption.

With none free, whoever runs longer than was predicted preempts others; with many free, memory lies idle. How many are
right depends on the lengths. So the headroom is steered by what preemption has cost: each token that is computed once
more adds to it, each token that is computed takes off a small share of that.
"""

from __future__ import annotations

import numpy as np

from tok_core.messages import Int64

INITIAL_SEQUENCES = 1.5  # sequences' worth of pages at the start
MIN_SEQUENCES, MAX_SEQUENCES = 0.3, 2.0  # and between which it moves
RECOMPUTED_SHARE = 0.01  # share of the tokens that may be computed twice
SEQUENCES_STEP = 0.15  # sequences' worth that a sequence which is computed twice adds
MIN_PAGE_SHARE, MAX_PAGE_SHARE = 0.005, 0.04  # of all pages, between which it stays
NEAR_STEPS = 32  # steps after which nothing is kept: until then, whoever has not started can be held back


class PageWatermark:
    """Moves between `MIN_SEQUENCES` and `MAX_SEQUENCES` sequences' worth of pages.

    How far chance takes memory beyond the forecast goes with the pages of a sequence, however many sequences there are:
    as far as it goes, so much faster does memory empty on its own.
    """

    def __init__(self) -> None:
        self.sequences = INITIAL_SEQUENCES
        self._computed = 0
        self._twice = 0

    def observe(self, computed: int, twice: int, each: float, *, guessed: bool) -> None:
        """Tokens so far that were computed, and of these for the second time; tokens that a sequence has, `each`.

        `guessed`: too few lengths are known. What is computed twice then is the price of the guess, not of chance.
        """
        cost = (twice - self._twice) - RECOMPUTED_SHARE * (computed - self._computed)
        self._computed, self._twice = computed, twice
        if not guessed:
            self.sequences = min(
                max(self.sequences + SEQUENCES_STEP * cost / max(each, 1.0), MIN_SEQUENCES), MAX_SEQUENCES
            )

    def pages(self, each: float, total: int, moments: Int64) -> Int64:
        """Pages of `total` to leave free at `moments`, steps from now, int64 [M]. `each`: pages that a sequence has."""
        now = min(max(self.sequences * each, MIN_PAGE_SHARE * total), MAX_PAGE_SHARE * total)
        pages: Int64 = (now * np.maximum(0.0, 1 - moments / NEAR_STEPS)).astype(np.int64)
        return pages
