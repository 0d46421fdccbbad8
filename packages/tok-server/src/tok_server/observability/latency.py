"""Latencies: how long requests took, as histograms of the last seconds and of the last hour.

B buckets, each `RATIO` times as wide as the one before: a percentile is off by at most half of that, and what is kept
does not grow with the requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tok_server.observability.ring import Ring

KINDS = ("ttft", "token", "e2e")
SHARES = (0.5, 0.9, 0.99)

LOW, HIGH = 1e-4, 1e4  # seconds
RATIO = 1.15
BUCKETS = 2 + math.ceil(math.log(HIGH / LOW) / math.log(RATIO))
BOUNDS = [LOW * RATIO**bucket for bucket in range(BUCKETS - 1)]  # the most seconds of each bucket but the last

RECENT = 10  # seconds
SLICES = 360  # of RECENT seconds: an hour

Counts = npt.NDArray[np.uint32]


class Took(NamedTuple):
    """Seconds that one request took: to its first token, for each token after it, in all. None: it has none."""

    ttft: float
    token: float | None
    e2e: float


class Latencies:
    """What `observe` was told. `tick` is to be called once a second."""

    def __init__(self) -> None:
        self._now = _none()
        self._seconds: Ring[np.uint32] = Ring(RECENT, (len(KINDS), BUCKETS), np.uint32)
        self._slices: Ring[np.uint32] = Ring(SLICES, (len(KINDS), BUCKETS), np.uint32)
        self._ticks = 0

    def observe(self, took: Took) -> None:
        """One request has ended well."""
        for kind, seconds in enumerate(took):
            if seconds is not None:
                self._now[kind][bisect_left(BOUNDS, seconds)] += 1

    def tick(self) -> None:
        """A second is over."""
        self._seconds.push(np.array(self._now, np.uint32))
        self._now = _none()
        self._ticks += 1
        if self._ticks % RECENT == 0:
            self._slices.push(_sum(self._seconds.rows()))

    def recent(self) -> list[float]:
        """Each kind's `SHARES` percentiles, seconds, of the last `RECENT` seconds; NaN where nothing ended."""
        return _percentiles(_sum(self._seconds.rows()))

    def hour(self) -> list[float]:
        """The same of the last hour."""
        return _percentiles(self._whole())

    def ended(self) -> int:
        """Requests that ended in the last hour."""
        return int(self._whole()[-1].sum())

    def _whole(self) -> Counts:
        unsliced = self._seconds.rows()[::-1][: self._ticks % RECENT]
        return _sum(self._slices.rows()) + _sum(unsliced)


def _none() -> list[list[int]]:
    """As lists: to add one to an array's element takes longer than all else that is done about it."""
    return [[0] * BUCKETS for _ in KINDS]


def _sum(slices: Counts) -> Counts:
    summed: Counts = slices.sum(0, dtype=np.uint32)
    return summed


def _percentiles(counts: Counts) -> list[float]:
    return [_percentile(of_kind, share) for of_kind in counts for share in SHARES]


def _percentile(counts: Counts, share: float) -> float:
    """Within its bucket by geometric interpolation; NaN without any."""
    below = counts.cumsum(dtype=np.int64)
    if below[-1] == 0:
        return math.nan
    rank = share * float(below[-1])
    bucket = int(np.searchsorted(below, rank))
    inside = 1 - (float(below[bucket]) - rank) / float(counts[bucket])
    return float(LOW * RATIO ** (bucket - 1 + inside))
