"""LengthModel: how many more tokens a sample will run, learned from those that finished.

Finished samples are counted in buckets of geometrically growing width, with weights that fade. The chance to outlive
a length is the Kaplan–Meier estimate over the buckets (Kaplan and Meier 1958), so that samples which their limit cut
off count as survivors of their length and not as ends. A sample that has run g tokens is expected to run the mean
residual life from g on, up to its limit: the sum over t = g … limit − 1 of P(longer than t) / P(longer than g).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.messages import Int64

Float64 = NDArray[np.float64]

HALF_LIFE = 2048  # finished samples after which one counts half
PRIOR_WEIGHT = 16.0  # longer-lived finished samples at which they and the prior weigh the same
LONGEST = 1 << 31
GROWTH = 1.08
SHORT = 1 << 16  # lengths up to here have their piece of the curve looked up


class _Curve(NamedTuple):
    """Piecewise linear in the length, with a knot before each bucket: shares and weights that live beyond it."""

    survival: Float64
    at_risk: Float64
    area: Float64  # of `survival`, up to the knot


class _Point(NamedTuple):
    """The curve at some lengths [n]."""

    survival: Float64
    at_risk: Float64
    sum: Float64  # of `survival` over 0 … length − 1


class LengthModel:
    """Predicts further tokens of samples. Its size is fixed.

    Where few finished samples ran as long as the one in question, its prediction is drawn to half of what its limit
    leaves: PRIOR_WEIGHT finished samples' worth.
    """

    def __init__(self) -> None:
        self._edges = _edges()
        self._knots = self._edges.astype(np.float64) - 1
        self._pieces = self._search(np.arange(SHORT))
        self._ended = np.zeros(len(self._edges) - 1)
        self._cut = np.zeros(len(self._edges) - 1)
        self._curve: _Curve | None = None

    def observe(self, lengths: Int64, censored: NDArray[np.bool_] | None = None) -> None:
        """Learns from finished samples of `lengths` tokens, [n]. Those `censored`, bool [n], their limit cut off."""
        cut = np.zeros(len(lengths), np.bool_) if censored is None else censored
        bucket = np.searchsorted(self._edges, np.clip(lengths, 1, LONGEST - 1), side="right") - 1
        fade = 0.5 ** (len(lengths) / HALF_LIFE)
        self._ended = self._ended * fade + np.bincount(bucket[~cut], minlength=len(self._ended))
        self._cut = self._cut * fade + np.bincount(bucket[cut], minlength=len(self._cut))
        self._curve = None

    def remaining(self, generated: Int64, limit: Int64) -> Int64:
        """Expected further tokens, int64 [n], of samples that have run `generated` of at most `limit` tokens.

        Between 1 and limit − generated; 0 where that is nothing.
        """
        left = np.maximum(limit - generated, 0)
        prior = left / 2
        alive, known, before = self._at(generated)
        life = self._at(limit).sum - before
        learned = np.divide(life, alive, out=prior.copy(), where=alive > 0)
        trust = known / (known + PRIOR_WEIGHT)
        expected = np.rint(trust * learned + (1 - trust) * prior).astype(np.int64)
        bounded: Int64 = np.minimum(np.maximum(expected, 1), left)
        return bounded

    def _search(self, length: Int64) -> Int64:
        """The piece of the curve that each length is on."""
        return np.searchsorted(self._knots, np.minimum(length, LONGEST - 1), side="right") - 1

    def _fit(self) -> _Curve:
        at_risk = np.cumsum((self._ended + self._cut)[::-1])[::-1]
        hazard = np.divide(self._ended, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0)
        survival = np.concatenate(([1.0], np.cumprod(1 - hazard)))
        pieces = np.diff(self._knots) * (survival[:-1] + survival[1:]) / 2
        return _Curve(survival, np.append(at_risk, 0.0), np.concatenate(([0.0], np.cumsum(pieces))))

    def _at(self, length: Int64) -> _Point:
        """The curve at each of `length`; on whole lengths, trapezoids miss half of the first term less the last."""
        if self._curve is None:
            self._curve = self._fit()
        survival, at_risk, area = self._curve
        piece = self._pieces[length] if length.max(initial=0) < SHORT else self._search(length)
        past = length - self._knots[piece]
        share = past / (self._knots[piece + 1] - self._knots[piece])
        here = survival[piece]
        alive = here + share * (survival[piece + 1] - here)
        known = at_risk[piece] + share * (at_risk[piece + 1] - at_risk[piece])
        return _Point(alive, known, area[piece] + past * (here + alive) / 2 + (1 - alive) / 2)


def _edges() -> Int64:
    """First lengths of the buckets, and the end of the last. Every length has its own at first, then GROWTH rules."""
    edges = [1]
    while edges[-1] < LONGEST:
        edges.append(max(edges[-1] + 1, int(edges[-1] * GROWTH)))
    return np.array(edges, np.int64)
