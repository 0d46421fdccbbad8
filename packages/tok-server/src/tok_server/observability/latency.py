"""Latencies: histograms of request durations, over the last seconds and over the last hour.

Each bucket is `BUCKET_RATIO` times as wide as the one before. A percentile always lies in the right bucket. Memory does
not grow with the number of requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tok_server.observability.ring import Ring

KINDS = ("ttft", "token", "e2e")
QUANTILES = (0.5, 0.9, 0.99)

MIN_LATENCY_SECONDS, MAX_LATENCY_SECONDS = 1e-4, 1e4  # seconds
BUCKET_RATIO = 1.15
BUCKETS = 2 + math.ceil(math.log(MAX_LATENCY_SECONDS / MIN_LATENCY_SECONDS) / math.log(BUCKET_RATIO))
BOUNDS = [
    MIN_LATENCY_SECONDS * BUCKET_RATIO**bucket for bucket in range(BUCKETS - 1)
]  # upper bound, in seconds, of each bucket but the last

RECENT_SECONDS = 10  # seconds
HOUR_SLICES = 360  # slices of RECENT_SECONDS: one hour

Counts = npt.NDArray[np.uint32]


class RequestDurations(NamedTuple):
    """Seconds that one request took: to its first token, per token after it (None without any), and in total."""

    ttft: float
    token: float | None
    e2e: float


class Latencies:
    """Histograms of the durations passed to `observe`. Call `tick` once a second."""

    def __init__(self) -> None:
        self._current = _zero_counts()
        self._seconds: Ring[np.uint32] = Ring(RECENT_SECONDS, (len(KINDS), BUCKETS), np.uint32)
        self._slices: Ring[np.uint32] = Ring(HOUR_SLICES, (len(KINDS), BUCKETS), np.uint32)
        self._ticks = 0

    def observe(self, durations: RequestDurations) -> None:
        """Count a request that has ended successfully."""
        for kind, seconds in enumerate(durations):
            if seconds is not None:
                self._current[kind][bisect_left(BOUNDS, seconds)] += 1

    def tick(self) -> None:
        """End the current second; every `RECENT_SECONDS` seconds, add their sum to the hour."""
        self._seconds.push(np.array(self._current, np.uint32))
        self._current = _zero_counts()
        self._ticks += 1
        if self._ticks % RECENT_SECONDS == 0:
            self._slices.push(_sum(self._seconds.rows()))

    def recent(self) -> list[float]:
        """Return each kind's `QUANTILES`, in seconds, of the last `RECENT_SECONDS`; NaN without requests."""
        return _percentiles(_sum(self._seconds.rows()))

    def hour(self) -> list[float]:
        """Return each kind's `QUANTILES`, in seconds, of the last hour."""
        return _percentiles(self._last_hour())

    def ended(self) -> int:
        """Return the number of requests that ended in the last hour."""
        return int(self._last_hour()[-1].sum())

    def _last_hour(self) -> Counts:
        unsliced = self._seconds.rows()[::-1][: self._ticks % RECENT_SECONDS]
        return _sum(self._slices.rows()) + _sum(unsliced)


def _zero_counts() -> list[list[int]]:
    """Return zero counts as lists: incrementing an array's element takes longer than all the rest of `observe`."""
    return [[0] * BUCKETS for _ in KINDS]


def _sum(slices: Counts) -> Counts:
    summed: Counts = slices.sum(0, dtype=np.uint32)
    return summed


def _percentiles(counts: Counts) -> list[float]:
    return [_percentile(of_kind, quantile) for of_kind in counts for quantile in QUANTILES]


def _percentile(counts: Counts, quantile: float) -> float:
    """Return the percentile, interpolated geometrically within its bucket; NaN if all counts are zero."""
    below = counts.cumsum(dtype=np.int64)
    if below[-1] == 0:
        return math.nan
    rank = quantile * float(below[-1])
    bucket = int(np.searchsorted(below, rank))
    inside = 1 - (float(below[bucket]) - rank) / float(counts[bucket])
    return float(MIN_LATENCY_SECONDS * BUCKET_RATIO ** (bucket - 1 + inside))
