"""Predict how many more tokens a sample will run, from samples that have finished and samples still running.

Lengths are put in buckets of geometrically growing width. The probability to end within a bucket is the number of
samples that ended there over the number that reached it (Kaplan and Meier 1958). Running samples count in every bucket
they have passed. Samples cut off by their limit count as censored, not as ended. Counts decay with every sample that
finishes later.

There is one survival curve for each power of two of the limit. With little data, it is pulled towards the curve of all
samples, which is itself pulled towards a prior, the distribution of Lomax (1954): the longer a sample has run, the
longer it will still run. Observed lengths soon outweigh the prior.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tok_core.messages import Float64, Int64

HALF_LIFE = 2048  # finished samples after which an earlier one counts half
PRIOR_WEIGHT = 16.0  # samples reaching a bucket at which they and the prior weigh the same
SCALE, SHAPE = 640.0, 5.0  # of the prior: of samples at t tokens, ((SCALE + t) / (SCALE + u)) ** SHAPE reach u tokens
MAX_LENGTH_TOKENS = 1 << 31
GROWTH = 1.08  # ratio of the first lengths of successive buckets
MAX_TABLE_TOKENS = 1 << 16  # lengths below this find their bucket in a table
CLASSES = 33  # classes of limits: below 2⁰, 2¹, …; the last row of the counts is of all samples
CERTAIN = 1 - 1e-9  # largest probability to end in a bucket: survival is never ruled out


class LengthModel:
    """Model of the remaining lengths of samples; its size is fixed."""

    def __init__(self) -> None:
        self.finished = 0  # samples, since the start
        self._edges = _edges()
        self._knots = self._edges.astype(np.float64) - 1
        self._passed = self._search(np.arange(MAX_TABLE_TOKENS))
        self._ended = np.zeros((CLASSES + 1, len(self._edges) - 1))
        self._came = np.zeros_like(self._ended)
        self._guess = 1 - ((SCALE + self._knots[:-1]) / (SCALE + self._knots[1:])) ** SHAPE
        self._curves: dict[int, Float64] = {}

    def observe(self, seen: Int64, lengths: Int64, limit: Int64, ended: NDArray[np.bool_]) -> None:
        """Learn from samples that have finished with `lengths` of at most `limit` tokens; all arrays are [n].

        `seen`: tokens already counted by `follow`. `ended`: bool, not cut off by the limit.
        """
        self.finished += len(lengths)
        fade = 0.5 ** (len(lengths) / HALF_LIFE)
        self._ended *= fade
        self._came *= fade
        self.follow(seen, lengths, limit)
        kind, bucket = _kinds(limit)[ended], self._buckets(lengths)[ended] - 1
        np.add.at(self._ended, (kind, bucket), 1.0)
        np.add.at(self._ended[-1], bucket, 1.0)

    def follow(self, seen: Int64, generated: Int64, limit: Int64) -> None:
        """Count that samples of at most `limit` tokens have grown from `seen` to `generated` tokens; int64 [n] each."""
        first, end, width = self._buckets(seen), self._buckets(generated), self._ended.shape[1]
        moved = (first != end).nonzero()[0]  # most samples stay in their bucket for many steps
        first, end, kinds = first[moved], end[moved], _kinds(limit[moved])
        came = np.zeros(width, np.int64)  # of all classes
        for kind in _present(kinds):
            of_kind = kinds == kind
            turns = np.bincount(first[of_kind], minlength=width + 1) - np.bincount(end[of_kind], minlength=width + 1)
            here = np.cumsum(turns[:-1])
            self._came[kind] += here
            came += here
        self._came[-1] += came
        self._curves = {}

    def remaining(self, generated: Int64, limit: Int64, share: Float64) -> Int64:
        """Return the quantile `share` of each sample's remaining tokens, int64 [n].

        generated, limit  tokens so far and at most, int64 [n]
        share             float64 [n], in [0, 1). Shares spread evenly over many samples give their mean use of memory

        The result is between 1 and limit − generated, or 0 if that is 0 or less.
        """
        left = np.maximum(limit - generated, 0)
        further = left.copy()
        for rows, curve in self._by_curve(limit):
            now = generated[rows]
            further[rows] = np.ceil(self._reached(curve, self._alive(curve, now) * (1 - share[rows])) - now)
        bounded: Int64 = np.minimum(np.maximum(further, 1), left)
        return bounded

    def _by_curve(self, limit: Int64) -> list[tuple[NDArray[np.bool_] | slice, Float64]]:
        kinds = _kinds(limit)
        present = _present(kinds)
        if len(present) == 1:
            return [(slice(None), self._curve(present[0]))]
        return [(kinds == kind, self._curve(kind)) for kind in present]

    def _curve(self, kind: int) -> Float64:
        """Return the probability to outlive each knot for limits of one class; it falls, but never to 0."""
        if kind not in self._curves:
            ended, came = self._ended[-1], self._came[-1]
            every = _learned(ended, came, self._guess)
            here = _learned(self._ended[kind], self._came[kind], every)
            alive = np.cumprod(1 - np.minimum(here, CERTAIN))
            self._curves[kind] = np.concatenate(([1.0], np.maximum(alive, 1e-290)))
        return self._curves[kind]

    def _alive(self, curve: Float64, length: Int64) -> Float64:
        """Return the probability to outlive each length, float64 [n] of int64 [n]; `curve`: as `_curve` returns it."""
        longest = int(length.max())
        if longest >= len(length):
            return np.interp(length, self._knots, curve)
        alive: Float64 = np.interp(np.arange(longest + 1), self._knots, curve)[length]  # faster by far: see `_reached`
        return alive

    def _reached(self, curve: Float64, alive: Float64) -> Float64:
        """Return the lengths that samples outlive with probability `alive`, float64 [n]: the inverse of `_alive`."""
        # `np.interp` begins each search at the number before: roughly sorted ones take a tenth of the time. NumPy sorts
        # 16 bits by radix.
        order = np.argsort((alive * 0xFFFF).astype(np.uint16), kind="stable")
        lengths = np.empty(len(alive))
        lengths[order] = np.interp(alive[order], curve[::-1], self._knots[::-1])
        return lengths

    def _buckets(self, length: Int64) -> Int64:
        """Return how many buckets begin at or before each length."""
        return self._passed[length] if length.max(initial=0) < MAX_TABLE_TOKENS else self._search(length)

    def _search(self, length: Int64) -> Int64:
        return np.searchsorted(self._edges, np.minimum(length, MAX_LENGTH_TOKENS - 1), side="right")


def _learned(ended: Float64, came: Float64, guess: Float64) -> Float64:
    return (ended + PRIOR_WEIGHT * guess) / (came + PRIOR_WEIGHT)


def _kinds(limit: Int64) -> Int64:
    """Return the class of each limit: the exponent of the next power of two above it."""
    kinds: Int64 = np.minimum(np.frexp(limit.astype(np.float64))[1], CLASSES - 1).astype(np.int64)
    return kinds


def _present(kinds: Int64) -> list[int]:
    """Return the distinct classes, ascending."""
    present: list[int] = np.bincount(kinds).nonzero()[0].tolist()
    return present


def _edges() -> Int64:
    """Return the first lengths of the buckets, and the end of the last.

    Short lengths have a bucket each; from there on, buckets grow by GROWTH.
    """
    edges = [1]
    while edges[-1] < MAX_LENGTH_TOKENS:
        edges.append(max(edges[-1] + 1, int(edges[-1] * GROWTH)))
    return np.array(edges, np.int64)
