"""Heartbeat: how far this process's main loop has come, for the engine to notice a process that hangs.

`processes.child` sends the count from a thread of its own, and `processes.liveness` judges it. A stopped process sends
nothing; one whose main loop hangs sends the same count again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TURN = 1.0  # seconds for which an idle main loop waits before it turns


class Heartbeat:
    """Counts turns of a main loop. Changed by the main thread, read by the thread that sends."""

    def __init__(self) -> None:
        self._turns = 0
        self._coarse = False

    def turned(self) -> None:
        """The main loop has come round, or a start has done one more of its parts."""
        self._turns += 1

    @contextmanager
    def coarse(self) -> Iterator[None]:
        """Count the life of the process as progress: for parts of a start that take minutes and report nothing, such as
        compilers and downloads."""
        self._coarse = True
        try:
            yield
        finally:
            self._coarse = False

    def beat(self) -> int:
        """The count to send now."""
        self._turns += self._coarse
        return self._turns


HEARTBEAT = Heartbeat()
"""The beat of this process: each has one main loop. Replicas within one process share it, and nobody reads it there."""
