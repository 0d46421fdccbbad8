"""Log steps whose launch takes the host ten times as long as usual, with hints at the cause.

The runner calls LaunchWatch around each launch, in the thread that launches.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("tok_core")

SLOW_FACTOR = 10  # a slow launch takes at least this multiple of the usual time of its kind
MIN_SLOW_SECONDS = 0.02  # the steps in flight hide shorter launches
MIN_LAUNCHES = 20  # launches of a kind before its usual time is known
AVERAGE_WEIGHT = 0.05  # weight of the newest launch in the moving average; its time is capped at twice the average
MIN_LOG_INTERVAL = 60.0  # seconds between two log lines


class LaunchWatch:
    """Watch over one thread's launches: call `begin` before each and `end` after it.

    Launches that replay a CUDA graph, and launches kernel by kernel, each have a usual time: a moving average.

    builds  kernels that this process has compiled or loaded; `tok_kernels.compilation` appends to the list
    clock   seconds, for the interval between log lines
    """

    def __init__(self, builds: Sequence[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._builds = builds
        self._clock = clock
        self._next_log_time = -float("inf")
        self._unlogged = 0  # slow launches since the last log line
        self.reset()

    def reset(self) -> None:
        """Forget the usual times."""
        self._launches = {True: 0, False: 0}  # by whether they replay a graph
        self._usual_seconds = {True: 0.0, False: 0.0}

    def begin(self) -> None:
        """Record the thread's CPU time and preemptions, and the number of kernel builds, before a launch."""
        self._cpu_before, self._preemptions_before = time.thread_time(), _preemptions()
        self._builds_before = len(self._builds)

    def end(self, step: int, seconds: float, *, graph: bool) -> None:
        """Log a launch that took `seconds` if it was slow, and add it to the average. `graph`: it replayed a graph."""
        usual = self._usual_seconds[graph]
        if self._launches[graph] >= MIN_LAUNCHES and seconds >= max(SLOW_FACTOR * usual, MIN_SLOW_SECONDS):
            self._log(step, seconds, usual)
        self._launches[graph] += 1
        weight = max(AVERAGE_WEIGHT, 1 / self._launches[graph])
        self._usual_seconds[graph] += weight * ((min(seconds, 2 * usual) if usual else seconds) - usual)

    def _log(self, step: int, seconds: float, usual: float) -> None:
        now = self._clock()
        if now < self._next_log_time:
            self._unlogged += 1
            return
        cpu = time.thread_time() - self._cpu_before
        preempted = _preemptions() - self._preemptions_before
        built = ", ".join(self._builds[self._builds_before :]) or "none"
        log.warning(
            "the launch of step %d took the host %.0f ms, usually %.1f ms: %.0f ms of them on a CPU, preempted %d "
            "times, kernels built: %s%s",
            *(step, seconds * 1e3, usual * 1e3, cpu * 1e3, preempted, built),
            f"; {self._unlogged} more slow launches since the last such line" if self._unlogged else "",
        )
        self._next_log_time, self._unlogged = now + MIN_LOG_INTERVAL, 0


def _preemptions() -> int:
    """Return this thread's involuntary context switches so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
