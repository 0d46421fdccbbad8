"""Clock: time that has really passed. A wall clock that jumps neither deletes a file nor ends a batch.

Deadlines are kept on a scale that begins with the wall clock's time when the data directory is first used, and advances
only by time that was measured: while a server runs, and between two servers if the machine has not been rebooted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Reading(NamedTuple):
    """The clock as it is saved.

    elapsed  seconds on its scale
    boot     names the boot of the machine; "": unknown
    uptime   seconds since that boot
    """

    elapsed: float
    boot: str
    uptime: float


def uptime() -> float:
    """Return the seconds since the machine's boot, those of its sleep included where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return a name of this boot of the machine; "" if the system has none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Clock:
    """One data directory's clock. Call `start` before `now`.

    wall    seconds since 1970, for what people read
    uptime  seconds that never jump
    boot    names the time over which `uptime` can be compared
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        uptime: Callable[[], float] = uptime,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        self.wall = wall
        self._uptime = uptime
        self._boot = boot()
        self._origin = 0.0

    def start(self, saved: Reading | None) -> None:
        """Go on from where the clock was saved; `None`: begin."""
        uptime = self._uptime()
        if saved is None:
            self._origin = self.wall() - uptime
        elif saved.boot and saved.boot == self._boot and uptime >= saved.uptime:
            self._origin = saved.elapsed - saved.uptime
        else:  # nobody has measured how long the machine was off: that time does not count
            self._origin = saved.elapsed - uptime

    def now(self) -> float:
        """Return the seconds on the clock's scale."""
        return self._origin + self._uptime()

    def reading(self) -> Reading:
        """Return what `start` needs to go on."""
        uptime = self._uptime()
        return Reading(self._origin + uptime, self._boot, uptime)
