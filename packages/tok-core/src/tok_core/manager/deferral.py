"""Deferral: work that can wait is put off while the worker is about to run dry."""

from __future__ import annotations

MOST = 2  # steps in a row that go without
FEW = 128  # of so many that run, at most one has left room for another


def runs_low(queued: int, wanted: int) -> bool:
    """Whether fewer than half of the `wanted` steps are queued at the worker; one that is the only one wanted is no
    sign: the worker waits for each."""
    return queued < wanted // 2


class Deferral:
    """One kind of work that every step would like to do. It is caught up with when the queue has filled, or is due."""

    def __init__(self) -> None:
        self.count = 0  # steps that went without
        self._left = 0  # that have ended since the last that did not
        self._row = 0

    def puts_off(self, *, hurried: bool, running: int) -> bool:
        """Whether this step goes without; `hurried`: the worker's queue runs low."""
        if hurried and self._row < MOST and self._left * FEW < running:
            self._row += 1
            self.count += 1
            return True
        self._row = self._left = 0
        return False

    def has_left(self, count: int) -> None:
        """So many have ended: there is more to gain by the work."""
        self._left += count
