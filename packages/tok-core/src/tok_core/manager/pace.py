"""Pace: samples start one after the other, not all at the moment that others leave room.

Samples that start together end together: memory is full only just before they do, and whoever takes their room at once
keeps it so for ever. Memory has as many page-steps to give as it has pages, each step. A sample costs the pages it is
expected to hold, summed over the steps it is expected to run. So once memory has been full, those that start may
together cost little more than what the steps since have given: their ages, and with them their ends, spread out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FULL = 0.85  # share of the pages in use from which on the pace is kept
HASTE = 0.3  # page-steps that may be spent beyond those there are, for each page that is not in use
SAVED = 8  # steps whose page-steps are kept, at most


class Pace:
    """An account of page-steps. It binds from when memory is full until no sample waits for memory."""

    def __init__(self) -> None:
        self._account = 0.0
        self._step = 0
        self._binds = False

    def allow(self, fitting: int, cost: NDArray[np.float64], capacity: int, used: int, step: int) -> int:
        """How many of the `fitting` first candidates may start in `step`; `cost`, float64 [m], is of all candidates.

        `capacity` pages may be used, `used` of them are.
        """
        income = capacity + HASTE * max(0, capacity - used)
        self._account = min(self._account + (step - self._step) * income, SAVED * income)
        self._step = step
        spent = np.cumsum(cost[:fitting])
        self._binds = fitting < len(cost) and (self._binds or used >= FULL * capacity)
        if not self._binds:
            self._account = 0.0
            return fitting
        allowed = 0
        if self._account > 0 and fitting:  # the last one may overdraw the account
            allowed = min(int(np.searchsorted(spent, self._account)) + 1, fitting)
            self._account -= float(spent[allowed - 1])
        return allowed
