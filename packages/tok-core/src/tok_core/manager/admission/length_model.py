"""LengthModel: how many more tokens a sample will run, learned from those that finished and those still running.

Lengths are put in buckets of geometrically growing width. The chance to end within a bucket is what ended there over
what came to it (Kaplan and Meier 1958): running samples count in every bucket they have passed, and samples that their
limit cut off are no ends. Counts fade with what has finished since. There is a curve for each power of two that limits
are of, drawn to that of all samples where little is known; and that one is drawn to a guess, the distribution of Lomax
(1954): a sample runs on the longer, the longer it has run. What has run on or ended at a length soon outweighs it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.admission.prompt_length_stats import PromptLengthStats
from tok_core.messages import Int64

Float64 = NDArray[np.float64]

HALF_LIFE = 2048  # finished samples after which one counts half
PRIOR_WEIGHT = 16.0  # samples that came to a bucket at which they and the guess weigh the same
SCALE, SHAPE = 640.0, 5.0  # of the guess: of those at t tokens, ((SCALE + t) / (SCALE + u)) ** SHAPE come to u
MAX_LENGTH_TOKENS = 1 << 31
GROWTH = 1.08
MAX_TABLE_TOKENS = 1 << 16  # lengths up to here have their bucket looked up
CLASSES = 33  # of limits: below 2⁰, 2¹, …; the last row of the counts is of all samples
CERTAIN = 1 - 1e-9  # of ends in a bucket: nothing is ruled out


class LengthModel:
    """Predicts further tokens of samples. Its size is fixed but for `families`, a row for each open request of many."""

    def __init__(self) -> None:
        self.prompt_stats = PromptLengthStats()
        self.finished = 0  # samples, since the start
        self._edges = _edges()
        self._knots = self._edges.astype(np.float64) - 1
        self._passed = self._search(np.arange(MAX_TABLE_TOKENS))
        self._ended = np.zeros((CLASSES + 1, len(self._edges) - 1))
        self._came = np.zeros_like(self._ended)
        self._guess = 1 - ((SCALE + self._knots[:-1]) / (SCALE + self._knots[1:])) ** SHAPE
        self._curves: dict[int, Float64] = {}

    def observe(
        self,
        seen: Int64,
        lengths: Int64,
        limit: Int64,
        ended: NDArray[np.bool_],
        family: Int64,
    ) -> None:
        """Samples that have finished with `lengths` of at most `limit` tokens; all arrays are [n].

        `seen`: tokens that `follow` was told of. `ended`: bool, not cut off by the limit. `family`: as of `families`.
        """
        self.prompt_stats.finish(family, self.hazard(lengths, limit), ended)
        self.finished += len(lengths)
        fade = 0.5 ** (len(lengths) / HALF_LIFE)
        self._ended *= fade
        self._came *= fade
        self.follow(seen, lengths, limit)
        kind, bucket = _kinds(limit)[ended], self._buckets(lengths)[ended] - 1
        np.add.at(self._ended, (kind, bucket), 1.0)
        np.add.at(self._ended[-1], bucket, 1.0)

    def follow(self, seen: Int64, generated: Int64, limit: Int64) -> None:
        """Samples of at most `limit` tokens have gone on from `seen` to `generated` tokens; int64 [n] each."""
        first, end, width = self._buckets(seen), self._buckets(generated), self._ended.shape[1]
        kind = _kinds(limit) * (width + 1)
        size = CLASSES * (width + 1)
        turns = np.bincount(kind + first, minlength=size) - np.bincount(kind + end, minlength=size)
        came = np.cumsum(turns.reshape(CLASSES, width + 1), axis=1)[:, :-1]
        self._came[:-1] += came
        self._came[-1] += came.sum(axis=0)
        self._curves = {}

    def hazard(self, generated: Int64, limit: Int64) -> Float64:
        """−log of the chance to outlive `generated` tokens, [n]: how many ends it takes, on average, to get there."""
        found = np.zeros(len(generated))
        for rows, curve in self._by_curve(limit):
            found[rows] = -np.log(np.interp(generated[rows], self._knots, curve))
        return found

    def remaining(self, generated: Int64, limit: Int64, family: Int64, share: Float64) -> Int64:
        """Further tokens, int64 [n], that `share` of samples like each run less than.

        generated, limit   tokens so far and at most, int64 [n]
        family             as of `families`: samples of one prompt end sooner or later than others by one factor
        share              float64 [n], in [0, 1). Shares spread evenly over many samples give their mean use of memory

        Between 1 and limit − generated; 0 where that is nothing.
        """
        left = np.maximum(limit - generated, 0)
        further = left.copy()
        rarity = (1 - share) ** (1 / self.prompt_stats.rate(family))
        for rows, curve in self._by_curve(limit):
            alive = np.interp(generated[rows], self._knots, curve)
            until = np.interp(alive * rarity[rows], curve[::-1], self._knots[::-1])
            further[rows] = np.ceil(until - generated[rows])
        bounded: Int64 = np.minimum(np.maximum(further, 1), left)
        return bounded

    def _by_curve(self, limit: Int64) -> list[tuple[NDArray[np.bool_] | slice, Float64]]:
        kinds = _kinds(limit)
        present = np.flatnonzero(np.bincount(kinds)).tolist() if len(kinds) else []
        if len(present) == 1:
            return [(slice(None), self._curve(present[0]))]
        return [(kinds == kind, self._curve(kind)) for kind in present]

    def _curve(self, kind: int) -> Float64:
        """Chance to outlive each knot, of samples whose limit is of a kind; falls, never to 0."""
        if kind not in self._curves:
            ended, came = self._ended[-1], self._came[-1]
            every = _drawn(ended, came, self._guess)
            here = _drawn(self._ended[kind], self._came[kind], every)
            alive = np.cumprod(1 - np.minimum(here, CERTAIN))
            self._curves[kind] = np.concatenate(([1.0], np.maximum(alive, 1e-290)))
        return self._curves[kind]

    def _buckets(self, length: Int64) -> Int64:
        """How many buckets begin at or before each length."""
        return self._passed[length] if length.max(initial=0) < MAX_TABLE_TOKENS else self._search(length)

    def _search(self, length: Int64) -> Int64:
        return np.searchsorted(self._edges, np.minimum(length, MAX_LENGTH_TOKENS - 1), side="right")


def _drawn(ended: Float64, came: Float64, guess: Float64) -> Float64:
    return (ended + PRIOR_WEIGHT * guess) / (came + PRIOR_WEIGHT)


def _kinds(limit: Int64) -> Int64:
    """The power of two above each limit."""
    kinds: Int64 = np.minimum(np.frexp(limit.astype(np.float64))[1], CLASSES - 1).astype(np.int64)
    return kinds


def _edges() -> Int64:
    """First lengths of the buckets, and the end of the last. Every length has its own at first, then GROWTH rules."""
    edges = [1]
    while edges[-1] < MAX_LENGTH_TOKENS:
        edges.append(max(edges[-1] + 1, int(edges[-1] * GROWTH)))
    return np.array(edges, np.int64)
