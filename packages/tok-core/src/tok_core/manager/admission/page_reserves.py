"""Keep pages free for later: a watermark against preemption, and a reserve for a steady stream of later samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.admission.forecast import PageDemand, usage
from tok_core.messages import Int64

INITIAL_SEQUENCES = 1.5  # watermark at the start, in pages of one sequence
MIN_SEQUENCES, MAX_SEQUENCES = 0.3, 2.0  # bounds of the watermark, in the same unit
RECOMPUTED_SHARE = 0.01  # share of the tokens that may be computed twice
SEQUENCES_STEP = 0.15  # raise of the watermark per sequence computed twice, in the same unit
MIN_PAGE_SHARE, MAX_PAGE_SHARE = 0.005, 0.04  # bounds of the watermark, as shares of all pages
NEAR_STEPS = 32  # steps from now after which no pages are kept: until then, waiting samples can still be held back


class PageWatermark:
    """Free pages to keep in reserve, worth `MIN_SEQUENCES` to `MAX_SEQUENCES` sequences.

    With no free pages, a sequence that runs longer than predicted preempts others. With many, memory lies idle. The
    right number depends on the lengths, so the watermark is steered by the cost of preemption: each recomputed token
    raises it, and each computed token lowers it by a small share of that.

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


FULL_SHARE = 0.85  # share of the capacity in use from which on admission is staggered
STREAM_SHARE = 0.93  # share of the capacity that is reserved for a stream
CURVE_STEPS = 8  # steps after which the curve is computed again
KNOTS = 64  # points of the curve
MIN_STREAM_SAMPLES = 32  # samples at their largest that memory must hold at once; fewer form no stream


class StaggeredAdmission:
    """Staggered starts: a curve along which a steady stream of later samples, starting now, fills the memory.

    Samples that start together end together. Memory is then full only just before they end, and samples that take over
    their pages all at once repeat the pattern without end. If samples start evenly instead, as many as memory can hold,
    each age holds the same share of memory at any time. So samples that start now must leave most of the pages that
    such a stream needs free at every future moment. Their ages, and with them their ends, spread out.

    active  whether admission is staggered: from when memory is full until no sample waits for memory
    """

    def __init__(self) -> None:
        self.active = False
        self._computed_at: float | None = None  # step in which the curve was computed
        self._each = 0.0  # mean number of own pages of a sample at its end
        self._knots: NDArray[np.float64] = np.zeros(1)
        self._share: NDArray[np.float64] = np.zeros(1)

    def observe(self, used: int, capacity: int, *, waits: bool) -> None:
        """Update `active`: `used` of `capacity` pages are in use; `waits`: there are samples that wait for pages."""
        self.active = waits and (self.active or used >= FULL_SHARE * capacity)

    def outdated(self, cycle: float) -> bool:
        """Return whether `cycle`, which only grows, needs a new curve."""
        return self._computed_at is None or cycle - self._computed_at >= CURVE_STEPS

    def compute_curve(self, cycle: float, typical: PageDemand, page_size: int) -> None:
        """Compute the curve of a stream of samples like the `typical` ones, of which there is at least one."""
        knots = np.linspace(0, max(1, int(typical.remaining.max())), KNOTS).astype(np.int64)
        held = usage(typical, knots, page_size).astype(np.float64)
        area = np.append(0.0, np.cumsum((held[1:] + held[:-1]) / 2 * np.diff(knots)))
        self._each = float(typical.at_end(page_size).mean())
        self._computed_at, self._knots, self._share = cycle, knots.astype(np.float64), area / max(area[-1], 1.0)

    def fits_stream(self, capacity: int) -> bool:
        """Return whether the curve's samples are small enough, relative to `capacity`, to leave pages for others.

        A sample that needs more pages than a full stream leaves would wait until it can run alone.
        """
        return capacity >= MIN_STREAM_SAMPLES * self._each

    def reserve(self, capacity: int, moments: Int64) -> Int64:
        """Return the pages of `capacity` that a stream starting now holds at `moments`, steps from now; int64 [M]."""
        pages: Int64 = (STREAM_SHARE * capacity * np.interp(moments, self._knots, self._share)).astype(np.int64)
        return pages
