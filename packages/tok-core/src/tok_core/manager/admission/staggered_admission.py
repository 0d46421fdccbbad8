"""Stagger admission: reserve pages for a steady stream of later samples instead of starting all at once.

Samples that start together end together: memory is full only just before they do, and whoever takes their room at once
keeps it so for ever. Where samples start evenly, one after the other, and as many as memory bears, each age holds the
same share of it at any time. So those that start now may take no more than leaves most of such a stream its room at
every moment to come: their ages, and with them their ends, spread out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.admission.forecast import usage
from tok_core.messages import Int64

FULL_SHARE = 0.85  # share of the capacity in use from which on the pace is kept
STREAM_SHARE = 0.93  # share of the capacity that a stream is to find
CURVE_STEPS = 8  # steps for which a curve is good
KNOTS = 64
MIN_STREAM_SAMPLES = 32  # samples that memory bears at once, at their largest, are no stream


class StaggeredAdmission:
    """The curve along which a stream that starts now comes to hold all of the memory.

    `binds`: from when memory is full until no sample waits for memory.
    """

    def __init__(self) -> None:
        self.binds = False
        self._drawn: float | None = None  # the step in which the curve was
        self._each = 0.0  # pages of its own that a sample has at its end
        self._knots: NDArray[np.float64] = np.zeros(1)
        self._share: NDArray[np.float64] = np.zeros(1)

    def observe(self, used: int, capacity: int, *, waits: bool) -> None:
        """Of the `capacity` pages so many are in use, and there are samples that wait for some."""
        self.binds = waits and (self.binds or used >= FULL_SHARE * capacity)

    def outdated(self, step: float) -> bool:
        """Whether `step`, which only grows, needs another curve."""
        return self._drawn is None or step - self._drawn >= CURVE_STEPS

    def draw(self, step: float, length: Int64, remaining: Int64, shared: Int64, page_size: int) -> None:
        """The curve of a stream of samples like these; int64 [n] each, as of `forecast`, and at least one."""
        knots = np.linspace(0, max(1, int(remaining.max())), KNOTS).astype(np.int64)
        held = usage(length, remaining, shared, page_size, knots).astype(np.float64)
        area = np.append(0.0, np.cumsum((held[1:] + held[:-1]) / 2 * np.diff(knots)))
        self._each = float((-(-(length + remaining) // page_size) - shared).mean())
        self._drawn, self._knots, self._share = step, knots.astype(np.float64), area / max(area[-1], 1.0)

    def bears(self, capacity: int) -> bool:
        """Whether the curve's samples are small enough beside the `capacity` for any to leave room for others.

        A sample that needs more than what a full stream leaves would wait until it is alone.
        """
        return capacity >= MIN_STREAM_SAMPLES * self._each

    def reserve(self, capacity: int, moments: Int64) -> Int64:
        """Pages of `capacity` that a stream from now on holds at each of `moments`, steps from now; int64 [M]."""
        pages: Int64 = (STREAM_SHARE * capacity * np.interp(moments, self._knots, self._share)).astype(np.int64)
        return pages
