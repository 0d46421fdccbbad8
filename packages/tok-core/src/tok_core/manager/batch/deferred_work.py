"""Defer optional work while the worker's queue runs low, within bounds, and count each deferral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

WorkKind = Literal["admission", "forecast", "regrouping", "cache", "statistics"]
WORK: Final[tuple[WorkKind, ...]] = get_args(WorkKind)


class DeferralLimit(NamedTuple):
    """How long work may wait.

    steps  that go without at most, one after the other
    few    the work is due as soon as it concerns one in so many of the sequences that run
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
"""Every kind of optional work, what a step without it does, and whom it concerns:

admission   the search for samples to start; none starts. Those that have left room
forecast    the length model is not told how far the running samples are: a search takes it as it was. Those that ended
regrouping  the last groups, as far as their rows still run; rows that are new read their prefixes alone. These
cache       what ended sequences hold stays theirs, instead of being cached or freed: there must be pages enough
            without, nothing prefills and no sample is looked for. Those that have ended
statistics  the report repeats the last figures. Those that have ended
"""


def runs_low(queued: int, wanted: int) -> bool:
    """Whether fewer than half of the `wanted` steps are queued at the worker; one that is the only one wanted is no
    sign: the worker waits for each."""
    return queued < wanted // 2


class DeferredWork:
    """What is put off, by kind. It is caught up with as soon as the queue has filled, or when it is due.

    counts  steps that went without; of `statistics`, reports
    """

    def __init__(self, bounds: Mapping[WorkKind, DeferralLimit] = BOUNDS) -> None:
        self._bounds = bounds
        self.counts: dict[WorkKind, int] = dict.fromkeys(WORK, 0)
        self._row: dict[WorkKind, int] = dict.fromkeys(WORK, 0)
        self._concerned: dict[WorkKind, int] = dict.fromkeys(WORK, 0)  # since it was done

    def puts_off(self, work: WorkKind, *, hurried: bool, running: int) -> bool:
        """Whether this step goes without; if not, it is done now. `hurried`: the worker's queue runs low."""
        bound = self._bounds[work]
        if hurried and self._row[work] < bound.steps and self._concerned[work] * bound.few < running:
            self._row[work] += 1
            self.counts[work] += 1
            return True
        self.done(work)
        return False

    def concern(self, count: int, *works: WorkKind) -> None:
        """So many sequences more are a reason to do the work."""
        for work in works:
            self._concerned[work] += count

    def done(self, work: WorkKind) -> None:
        """Nothing of it is left to do."""
        self._row[work] = self._concerned[work] = 0
