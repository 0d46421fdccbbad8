"""Detect a stuck worker by how long the manager has been waiting, independent of the wall clock.

When the clock has jumped, or the machine was suspended, one look finds an hour gone. The worker lost that hour, too.
"""

from __future__ import annotations

from collections.abc import Callable

from tok_core.errors import EngineDead

LOOK = 2.0  # seconds that one look counts, at most
MIN_IDLE_LOOKS = 4  # that find nothing before a worker is stuck


class Watchdog:
    """Adds up the seconds for which steps have been at the worker and none has come back.

    timeout  seconds after which that means that it is stuck
    clock    seconds; may jump forwards and backwards, or stand still
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout
        self._most = min(LOOK, timeout / MIN_IDLE_LOOKS)
        self._clock = clock
        self._looked = clock()
        self._silent = 0.0

    def look(self, *, owing: bool) -> None:
        """To be called every second at least. `owing`: steps are at the worker, and none has come back since the last
        look. Raises EngineDead when the worker is stuck: as good as dead."""
        now = self._clock()
        self._silent = self._silent + min(max(now - self._looked, 0.0), self._most) if owing else 0.0
        self._looked = now
        if self._silent > self._timeout:
            raise EngineDead(f"no step has come back for {self._timeout:g} s: the worker is stuck")
