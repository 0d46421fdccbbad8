"""Defer optional work while the worker's queue runs low, within bounds, and count each deferral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

WorkKind = Literal["admission", "forecast", "regrouping", "cache", "statistics"]
WORK: Final[tuple[WorkKind, ...]] = get_args(WorkKind)


class DeferralLimit(NamedTuple):
    """Bounds on how long work may wait.

    steps  largest number of consecutive steps without the work
    few    the work is due as soon as it concerns one in `few` of the running sequences
    """

    steps: int
    few: int


BOUNDS: Final[Mapping[WorkKind, DeferralLimit]] = {
    "admission": DeferralLimit(2, 128),
    "forecast": DeferralLimit(8, 32),
    "regrouping": DeferralLimit(4, 16),
    "cache": DeferralLimit(2, 64),
    "statistics": DeferralLimit(16, 128),
}
"""Every kind of optional work, the effect of a step without it, and the sequences that it concerns:

admission   No samples are searched for, and none starts. Concerns sequences that have ended.
forecast    The length model does not learn how far the running samples are; a search uses it as it was. Concerns
            sequences that have ended.
regrouping  The last groups are used, as far as their rows still run; new rows read their prefixes alone. Concerns new
            rows.
cache       Ended sequences keep their pages, which are neither cached nor freed. Deferred only if there are enough
            other pages, nothing prefills and no samples are searched for. Concerns sequences that have ended.
statistics  The report repeats the last figures. Concerns sequences that have ended.
"""


def runs_low(queued: int, wanted: int) -> bool:
    """Return whether fewer than half of the `wanted` steps are queued at the worker.

    With one wanted step, always return False: the worker then waits for each step anyway.
    """
    return queued < wanted // 2


class DeferredWork:
    """Optional work that is deferred, by kind. It is done as soon as the queue has filled, or when it is due.

    counts  number of steps without the work; for `statistics`, of reports
    """

    def __init__(self, bounds: Mapping[WorkKind, DeferralLimit] = BOUNDS) -> None:
        self._bounds = bounds
        self.counts: dict[WorkKind, int] = dict.fromkeys(WORK, 0)
        self._row: dict[WorkKind, int] = dict.fromkeys(WORK, 0)
        self._concerned: dict[WorkKind, int] = dict.fromkeys(WORK, 0)  # sequences concerned since it was done

    def defers(self, work: WorkKind, *, queue_low: bool, running: int) -> bool:
        """Return whether this step defers the work; if not, it is done now. `queue_low`: the worker runs dry soon."""
        bound = self._bounds[work]
        if queue_low and self._row[work] < bound.steps and self._concerned[work] * bound.few < running:
            self._row[work] += 1
            self.counts[work] += 1
            return True
        self.done(work)
        return False

    def concern(self, count: int, *works: WorkKind) -> None:
        """Note that the work concerns `count` more sequences."""
        for work in works:
            self._concerned[work] += count

    def done(self, work: WorkKind) -> None:
        """Note that the work has been done."""
        self._row[work] = self._concerned[work] = 0
