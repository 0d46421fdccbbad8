"""Adapt the number of pages kept free so that only a small share of tokens is recomputed after preemption.

With no free pages, a sequence that runs longer than predicted preempts others. With many, memory lies idle. The right
number depends on the lengths, so the watermark is steered by the cost of preemption: each recomputed token raises it,
and each computed token lowers it by a small share of that.
"""

from __future__ import annotations

import numpy as np

from tok_core.messages import Int64

INITIAL_SEQUENCES = 1.5  # watermark at the start, in pages of one sequence
MIN_SEQUENCES, MAX_SEQUENCES = 0.3, 2.0  # bounds of the watermark, in the same unit
RECOMPUTED_SHARE = 0.01  # share of the tokens that may be computed twice
SEQUENCES_STEP = 0.15  # raise of the watermark per sequence computed twice, in the same unit
MIN_PAGE_SHARE, MAX_PAGE_SHARE = 0.005, 0.04  # bounds of the watermark, as shares of all pages
NEAR_STEPS = 32  # steps from now after which no pages are kept: until then, waiting samples can still be held back


class PageWatermark:
    """Free pages to keep in reserve, worth `MIN_SEQUENCES` to `MAX_SEQUENCES` sequences.

    How far page use exceeds the forecast by chance depends on the pages of a sequence, not on the number of sequences:
    the larger the excess, the faster it also drains on its own.
    """

    def __init__(self) -> None:
        self.sequences = INITIAL_SEQUENCES
        self._computed = 0
        self._recomputed = 0

    def observe(self, computed: int, recomputed: int, each: float, *, guessed: bool) -> None:
        """Adapt the watermark to the tokens computed so far, and those of them that were computed twice.

        `each`: tokens that a sequence has. `guessed`: too few lengths are known. Recomputed tokens are then the price
        of the guess and not of chance, so the watermark stays as it is.
        """
        cost = (recomputed - self._recomputed) - RECOMPUTED_SHARE * (computed - self._computed)
        self._computed, self._recomputed = computed, recomputed
        if not guessed:
            self.sequences = min(
                max(self.sequences + SEQUENCES_STEP * cost / max(each, 1.0), MIN_SEQUENCES), MAX_SEQUENCES
            )

    def pages(self, each: float, total: int, moments: Int64) -> Int64:
        """Return pages of `total` to keep free at `moments`, steps from now, int64 [M]; `each`: pages of a sequence."""
        now = min(max(self.sequences * each, MIN_PAGE_SHARE * total), MAX_PAGE_SHARE * total)
        pages: Int64 = (now * np.maximum(0.0, 1 - moments / NEAR_STEPS)).astype(np.int64)
        return pages
