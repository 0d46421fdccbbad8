"""Log steps whose launch takes the host ten times as long as usual, with hints at the cause."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("tok_core")

SLOW_FACTOR = 10  # a slow launch takes at least this multiple of the usual time of its kind
MIN_SLOW_SECONDS = 0.02  # shorter launches are hidden by the steps in flight
MIN_LAUNCHES = 20  # launches of a kind before its usual time is known
AVERAGE_WEIGHT = 0.05  # weight of the newest launch in the moving average; its time is capped at twice the average
MIN_LOG_INTERVAL = 60.0  # seconds between two lines


class LaunchWatch:
    """Monitor of one thread's launches: call `begin` before each and `end` after it.

    Launches that replay a CUDA graph and launches of single kernels have separate averages. `builds` lists the kernels
    that this process has compiled or loaded; `tok_kernels.compilation` appends to it.
    """

    def __init__(self, builds: Sequence[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._builds = builds
        self._clock = clock
        self._next_line = -float("inf")
        self._unlogged = 0
        self.reset()

    def reset(self) -> None:
        """Forget the usual times."""
        self._launches = {True: 0, False: 0}
        self._usual = {True: 0.0, False: 0.0}

    def begin(self) -> None:
        """Record the thread's CPU time, preemptions and kernel builds before a launch."""
        self._cpu, self._preempted, self._built = time.thread_time(), _preemptions(), len(self._builds)

    def end(self, step: int, seconds: float, *, graph: bool) -> None:
        """Add a launch that took `seconds` to the average, and log it if it was slow. `graph`: it replayed a graph."""
        usual = self._usual[graph]
        if self._launches[graph] >= MIN_LAUNCHES and seconds >= max(SLOW_FACTOR * usual, MIN_SLOW_SECONDS):
            self._log(step, seconds, usual)
        self._launches[graph] += 1
        weight = max(AVERAGE_WEIGHT, 1 / self._launches[graph])
        self._usual[graph] += weight * ((min(seconds, 2 * usual) if usual else seconds) - usual)

    def _log(self, step: int, seconds: float, usual: float) -> None:
        now = self._clock()
        if now < self._next_line:
            self._unlogged += 1
            return
        cpu, preempted = time.thread_time() - self._cpu, _preemptions() - self._preempted
        built = ", ".join(self._builds[self._built :]) or "none"
        log.warning(
            "the launch of step %d took the host %.0f ms, usually %.1f ms: %.0f ms of them on a CPU, preempted %d "
            "times, kernels built: %s%s",
            *(step, seconds * 1e3, usual * 1e3, cpu * 1e3, preempted, built),
            f"; {self._unlogged} more slow launches since the last such line" if self._unlogged else "",
        )
        self._next_line, self._unlogged = now + MIN_LOG_INTERVAL, 0


def _preemptions() -> int:
    """Return this thread's involuntary context switches so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
