"""Histograms of times with logarithmic buckets: each is wider than the previous one by the same factor."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

MIN_BUCKETS, MAX_BUCKETS = 8, 40  # limits on the number of buckets, which grows with the number of values
MIN_EDGE_RATIO = 1.25  # minimum ratio of the last edge to the first, for values that are nearly equal
MIN_SECONDS = 1e-9  # lower bound on values, as 0 has no logarithm


class Histogram(msgspec.Struct, frozen=True):
    """Counts per bucket: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    edges: list[float]
    counts: list[int]


class Histograms(msgspec.Struct, frozen=True):
    """Times in seconds of one repetition's requests. None: unknown, because the answers were not streamed."""

    request: Histogram | None
    first_token: Histogram | None
    per_token: Histogram | None


def histogram(seconds: Sequence[float]) -> Histogram | None:
    """Return the histogram of `seconds`; None if it is empty."""
    if not seconds:
        return None
    values = np.maximum(seconds, MIN_SECONDS)
    low, high = float(values.min()), float(values.max())
    if high < low * MIN_EDGE_RATIO:
        low, high = low / MIN_EDGE_RATIO**0.5, high * MIN_EDGE_RATIO**0.5
    buckets = min(MAX_BUCKETS, max(MIN_BUCKETS, round(2 * len(values) ** 0.5)))
    edges = np.geomspace(low, high, buckets + 1)
    edges[0], edges[-1] = low, high  # exact, as rounded edges could leave out the smallest or largest value
    counts, _ = np.histogram(values, edges)
    return Histogram([float(f"{edge:.6g}") for edge in edges], counts.tolist())
