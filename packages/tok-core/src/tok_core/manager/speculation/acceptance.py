"""Estimate the acceptance rate of an `NgramIndex`'s predictions, by family and score."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.speculation.drafts import FAMILY_BITS
from tok_core.manager.speculation.ngram_index import MAX_SCORE, UInt64
from tok_core.messages import Float64, Int32, Int64

SCORES: Final = MAX_SCORE + 1
WINDOW: Final = 64  # predictions of a family and score; with more, the counts are halved
PRIOR: Final = 4  # predictions; weight of all families' share in the estimate of one family


class Acceptance:
    """Shares of right predictions, by family and by the score of the prediction.

    Every new token of a sample is compared with its prediction, drafted or not, so the shares are known without drafts.
    The share of a family with few predictions is close to that of all families:

        share = (right predictions + PRIOR · share of all families) / (predictions + PRIOR)

    share  share assumed of all families before the first prediction, with the weight of one
    """

    def __init__(self, share: float = 0.5) -> None:
        self._right = np.zeros(SCORES << FAMILY_BITS)
        self._made = np.zeros(SCORES << FAMILY_BITS)
        self._all_right = np.full(SCORES, share)  # of all families
        self._all_made = np.ones(SCORES)

    def observe(self, family: UInt64, score: Int32, right: NDArray[np.bool_]) -> None:
        """Count predictions and the right ones among them; skip entries of score 0, which predict nothing."""
        made = score > 0
        if not made.any():
            return
        score, right = score[made], right[made]
        at = _entries(family[made], score)
        np.add.at(self._made, at, 1)
        np.add.at(self._right, at[right], 1)
        old = at[self._made[at] > WINDOW]
        self._right[old] /= 2  # once for each entry, even if it is in `old` several times
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
