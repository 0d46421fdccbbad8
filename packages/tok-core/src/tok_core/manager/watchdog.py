"""Detect a stuck worker by how long the manager has been waiting, independent of the wall clock.

After a jump of the clock or a suspension of the machine, an hour may have passed between two looks, but not for the
worker. Each look therefore counts at most `LOOK` seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from tok_core.errors import EngineDead

LOOK = 2.0  # seconds that one look counts, at most
MIN_IDLE_LOOKS = 4  # looks without a returned step, at least, before a worker counts as stuck


class Watchdog:
    """Sum of the seconds for which steps have been at the worker and none has come back.

    timeout  seconds after which the worker counts as stuck
    clock    returns seconds; may jump forwards and backwards, or stand still
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout
        self._most = min(LOOK, timeout / MIN_IDLE_LOOKS)
        self._clock = clock
        self._looked = clock()
        self._silent = 0.0

    def look(self, *, owing: bool) -> None:
        """Add the time since the last look; call this at least once a second. Raises EngineDead if the worker is stuck.

        `owing`: steps are at the worker, and none has come back since the last look.
        """
        now = self._clock()
        self._silent = self._silent + min(max(now - self._looked, 0.0), self._most) if owing else 0.0
        self._looked = now
        if self._silent > self._timeout:
            raise EngineDead(f"no step has come back for {self._timeout:g} s: the worker is stuck")
