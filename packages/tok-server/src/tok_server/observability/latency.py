"""Latencies: histograms of request durations, over the last seconds and over the last hour.

Each bucket is `RATIO` times as wide as the one before. A percentile always lies in the right bucket. Memory does not
grow with the number of requests.
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
BOUNDS = [LOW * RATIO**bucket for bucket in range(BUCKETS - 1)]  # upper bound, in seconds, of each bucket but the last

RECENT = 10  # seconds
SLICES = 360  # slices of RECENT seconds: one hour

Counts = npt.NDArray[np.uint32]


class RequestDurations(NamedTuple):
    """Seconds that one request took: to its first token, per token after it (None without any), and in total."""

    ttft: float
    token: float | None
    e2e: float


class Latencies:
    """Histograms of the durations passed to `observe`. Call `tick` once a second."""

    def __init__(self) -> None:
        self._now = _none()
        self._seconds: Ring[np.uint32] = Ring(RECENT, (len(KINDS), BUCKETS), np.uint32)
        self._slices: Ring[np.uint32] = Ring(SLICES, (len(KINDS), BUCKETS), np.uint32)
        self._ticks = 0

    def observe(self, took: RequestDurations) -> None:
        """Count a request that has ended successfully."""
        for kind, seconds in enumerate(took):
            if seconds is not None:
                self._now[kind][bisect_left(BOUNDS, seconds)] += 1

    def tick(self) -> None:
        """End the current second; every `RECENT` seconds, add their sum to the hour."""
        self._seconds.push(np.array(self._now, np.uint32))
        self._now = _none()
        self._ticks += 1
        if self._ticks % RECENT == 0:
            self._slices.push(_sum(self._seconds.rows()))

    def recent(self) -> list[float]:
        """Return each kind's `SHARES` percentiles, in seconds, of the last `RECENT` seconds; NaN without requests."""
        return _percentiles(_sum(self._seconds.rows()))

    def hour(self) -> list[float]:
        """Return each kind's `SHARES` percentiles, in seconds, of the last hour."""
        return _percentiles(self._whole())

    def ended(self) -> int:
        """Return the number of requests that ended in the last hour."""
        return int(self._whole()[-1].sum())

    def _whole(self) -> Counts:
        unsliced = self._seconds.rows()[::-1][: self._ticks % RECENT]
        return _sum(self._slices.rows()) + _sum(unsliced)


def _none() -> list[list[int]]:
    """Return zero counts as lists: incrementing an array's element takes longer than all the rest of `observe`."""
    return [[0] * BUCKETS for _ in KINDS]


def _sum(slices: Counts) -> Counts:
    summed: Counts = slices.sum(0, dtype=np.uint32)
    return summed


def _percentiles(counts: Counts) -> list[float]:
    return [_percentile(of_kind, share) for of_kind in counts for share in SHARES]


def _percentile(counts: Counts, share: float) -> float:
    """Return the percentile, interpolated geometrically within its bucket; NaN if all counts are zero."""
    below = counts.cumsum(dtype=np.int64)
    if below[-1] == 0:
        return math.nan
    rank = share * float(below[-1])
    bucket = int(np.searchsorted(below, rank))
    inside = 1 - (float(below[bucket]) - rank) / float(counts[bucket])
    return float(LOW * RATIO ** (bucket - 1 + inside))
