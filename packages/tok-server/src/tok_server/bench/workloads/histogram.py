"""Histograms of times, in buckets each of which is wider than the one before by the same factor."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

FEWEST, MOST = 8, 40  # buckets: more for more values
NARROWEST = 1.25  # between the ends, even where all values are one
MIN_SECONDS = 1e-9  # what takes no time at all has no logarithm


class Histogram(msgspec.Struct, frozen=True):
    """`counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    edges: list[float]
    counts: list[int]


class Histograms(msgspec.Struct, frozen=True):
    """Of one repetition's requests, seconds each. None: not known, because the answers were not streamed."""

    request: Histogram | None
    first_token: Histogram | None
    per_token: Histogram | None


def histogram(seconds: Sequence[float]) -> Histogram | None:
    """Of all values; None without any."""
    if not seconds:
        return None
    values = np.maximum(seconds, MIN_SECONDS)
    low, high = float(values.min()), float(values.max())
    if high < low * NARROWEST:
        low, high = low / NARROWEST**0.5, high * NARROWEST**0.5
    buckets = min(MOST, max(FEWEST, round(2 * len(values) ** 0.5)))
    edges = np.geomspace(low, high, buckets + 1)
    edges[0], edges[-1] = low, high  # and not what rounding makes of them: no value may be left out
    counts, _ = np.histogram(values, edges)
    return Histogram([float(f"{edge:.6g}") for edge in edges], counts.tolist())
