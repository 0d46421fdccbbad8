"""Learn how often the predictions of an `NgramIndex` are right."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.speculation.ngram_index import MAX_SCORE, UInt64
from tok_core.messages import Int32, Int64

Float64 = NDArray[np.float64]

FAMILY_BITS: Final = 12  # families are kept apart if their numbers differ in so many of the last bits
SCORES: Final = MAX_SCORE + 1
WINDOW: Final = 64  # predictions of a family and score after which older ones count half
PRIOR: Final = 4  # predictions that the share among all families counts for, in a family of its own


class Acceptance:
    """Shares of right predictions, by family and by the score of the prediction.

    Every token that a sample gets shows whether it was predicted, drafted or not, so that nothing has to be drafted to
    find out. A family with few predictions of a score is taken to be like all others together:

        share = (right predictions + PRIOR · share of all families) / (predictions + PRIOR)
    """

    def __init__(self) -> None:
        self._right = np.zeros(SCORES << FAMILY_BITS)
        self._made = np.zeros(SCORES << FAMILY_BITS)
        self._all_right = np.full(SCORES, 0.5)  # of all families
        self._all_made = np.ones(SCORES)

    def observe(self, family: UInt64, score: Int32, right: NDArray[np.bool_]) -> None:
        """Count predictions. Those of score 0 are none."""
        made = score > 0
        if not made.any():
            return
        score, right = score[made], right[made]
        at = _entries(family[made], score)
        np.add.at(self._made, at, 1)
        np.add.at(self._right, at[right], 1)
        old = at[self._made[at] > WINDOW]
        self._right[old] /= 2  # once, however often `old` has an entry
        self._made[old] /= 2
        self._all_made += np.bincount(score, minlength=SCORES)
        self._all_right += np.bincount(score[right], minlength=SCORES)
        many = self._all_made > 16 * WINDOW
        self._all_right[many] /= 2
        self._all_made[many] /= 2

    def share(self, family: UInt64, score: Int32) -> Float64:
        """Return the probability that each prediction is right."""
        at = _entries(family, score)
        prior = PRIOR * self._all_right[score] / self._all_made[score]
        share: Float64 = (self._right[at] + prior) / (self._made[at] + PRIOR)
        return share


def _entries(family: UInt64, score: Int32) -> Int64:
    at: Int64 = (family & np.uint64((1 << FAMILY_BITS) - 1)).astype(np.int64) * SCORES + score
    return at
