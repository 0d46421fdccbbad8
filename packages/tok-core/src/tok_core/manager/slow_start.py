"""SlowStart: while few lengths are known, no more samples start than those that have finished vouch for.

The first samples to end are the short ones. To take them for all fills memory with samples that do not end.
"""

from __future__ import annotations

VOUCHED = 4  # samples that may start for each one that has finished


class SlowStart:
    """Binds until more samples have finished than run."""

    def __init__(self) -> None:
        self._finished = 0
        self._credit = 0

    def binds(self, finished: int, running: int) -> bool:
        """Whether too few lengths are known: `finished` samples since the start, for `running` ones."""
        self._credit += VOUCHED * (finished - self._finished)
        self._finished = finished
        return finished <= running

    def allow(self, fitting: int, sure: int) -> int:
        """How many may start of the `fitting` first ones, of which `sure` fit even if nobody ends before its limit."""
        allowed = min(fitting, max(sure, self._credit))
        self._credit = max(0, self._credit - allowed)
        return allowed
