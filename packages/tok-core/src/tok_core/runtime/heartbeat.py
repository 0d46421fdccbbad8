"""Count the turns of this process's main loop, so that the engine can detect a hung process.

`tok_core.replicas.processes.child` sends the count from a separate thread, and `tok_core.replicas.liveness` evaluates
it. A stopped process sends nothing. A process whose main loop hangs keeps sending the same count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MAX_TURN_SECONDS = 1.0  # maximum wait of an idle main loop before its next turn


class Heartbeat:
    """Counter of a main loop's turns. The main thread writes it, the heartbeat thread reads it."""

    def __init__(self) -> None:
        self._turns = 0
        self._coarse = False

    def turned(self) -> None:
        """Count a turn of the main loop, or a completed part of the startup."""
        self._turns += 1

    @contextmanager
    def coarse(self) -> Iterator[None]:
        """Count every heartbeat as progress within this context, since it cannot call `turned`.

        For operations that take long and report nothing, such as compilers and downloads.
        """
        self._coarse = True
        try:
            yield
        finally:
            self._coarse = False

    def beat(self) -> int:
        """Return the count to send now."""
        self._turns += self._coarse
        return self._turns


HEARTBEAT = Heartbeat()
"""The heartbeat of this process, which has one main loop. Replicas that run as threads of one process share it; no
thread reads it there."""
