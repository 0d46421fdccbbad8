"""Clock: measured time. A wall clock that jumps neither deletes a file nor ends a batch.

Deadlines are kept on a scale that begins with the wall clock's time when the data directory is first used. The scale
advances only by measured time: while a server runs, and between two servers if the machine has not been rebooted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClockReading(NamedTuple):
    """A saved state of the clock.

    elapsed  seconds on the clock's scale
    boot     identifies the boot of the machine; "": unknown
    uptime   seconds since that boot
    """

    elapsed: float
    boot: str
    uptime: float


def uptime() -> float:
    """Return the seconds since the machine's boot, including sleep where the system counts it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return an id of this boot of the machine; "" if the system has none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Clock:
    """Clock of one data directory. Call `start` before `now`.

    wall    returns seconds since 1970, for display
    uptime  returns seconds that never jump
    boot    returns an id; values of `uptime` are comparable only within the same boot
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

    def start(self, saved: ClockReading | None) -> None:
        """Continue from where the clock was saved; None: begin at the wall clock's time."""
        uptime = self._uptime()
        if saved is None:
            self._origin = self.wall() - uptime
        elif saved.boot and saved.boot == self._boot and uptime >= saved.uptime:
            self._origin = saved.elapsed - saved.uptime
        else:  # how long the machine was off is unknown: that time does not count
            self._origin = saved.elapsed - uptime

    def now(self) -> float:
        """Return the seconds on the clock's scale."""
        return self._origin + self._uptime()

    def reading(self) -> ClockReading:
        """Return the state that `start` needs to continue."""
        uptime = self._uptime()
        return ClockReading(self._origin + uptime, self._boot, uptime)
