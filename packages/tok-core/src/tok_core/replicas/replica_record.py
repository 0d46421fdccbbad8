"""Record state, failures and counters of one replica across its restarts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from tok_core.errors import TokError
from tok_core.messages import EngineInfo, Silence, Stats

if TYPE_CHECKING:
    from tok_core.replicas.replica import Replica

ReplicaState = Literal["starting", "ready", "unresponsive", "draining", "restarting", "failed"]
"""unresponsive: a process sends no heartbeats; no new requests until all do again, or the replica is killed.
draining: the replica completes its open requests and gets no new ones, until it is restarted."""

GAUGES = (
    *("requests_running", "requests_waiting", "sequences_running"),
    *("pages_total", "pages_used", "pages_cached", "steps_in_flight"),
)
"""Fields of `Stats` that are gauges, not counters."""

RESTART_DETAIL = "it was asked to restart"

FIRST_PAUSE_SECONDS = 0.5  # pause before the second restart within the window; doubles with each further restart
MAX_RESTART_PAUSE_SECONDS = 30.0


class ReplicaRecord:
    """State of one replica across its deaths and restarts. Only `ReplicaSet` changes it, under its lock.

    replica   the running replica; None while it does not run
    failure   error that the replica itself reported before its end
    """

    def __init__(
        self, number: int, max_restarts: int, window: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.number = number
        self.replica: Replica | None = None
        self.state: ReplicaState = "starting"
        self.detail = ""
        self.failure: TokError | None = None
        self.info: EngineInfo | None = None
        self.restarts = 0
        self._max_restarts = max_restarts
        self._window = window
        self._clock = clock
        self._deaths: deque[float] = deque()  # times of deaths within the window
        self._counted: deque[float] = deque()  # times of the deaths that count against `max_restarts`
        self._before = Stats()  # summed counters of earlier managers
        self._now = Stats()

    def mark_ready(self, info: EngineInfo) -> None:
        """Record that the replica serves."""
        self.info, self.state, self.detail = info, "ready", ""

    def count(self, stats: Stats) -> None:
        """Store the manager's latest counters and gauges."""
        self._now = stats

    def stats(self) -> Stats:
        """Return counters since the first start, and gauges."""
        return sum_stats((self._before, self._now))

    def record_death(self, reason: str, *, by_request: bool = False) -> bool:
        """Record that the replica has ended; return whether to restart it.

        by_request  a request caused the end. Once the replica has served, such an end does not count against
                    `max_restarts`
        """
        started = self.state != "starting"
        again = started and self._may_restart(counts=not by_request or self.state == "restarting")
        self.state, self.detail = "restarting" if again else "failed", self._why(reason, started)
        self._end(again)
        return again

    def record_silence(self, silence: Silence) -> None:
        """Record that processes of the replica have fallen silent, or send heartbeats again."""
        if silence.detail and self.state == "ready":
            self.state = "unresponsive"
        elif not silence.detail and self.state == "unresponsive":
            self.state = "ready"
        elif self.state != "starting":
            return
        self.detail = silence.detail

    def drain(self) -> None:
        """Record that the replica completes its open requests and is then restarted."""
        self.state, self.detail = "draining", RESTART_DETAIL

    def retire(self) -> None:
        """Record that the replica was ended in order to be restarted."""
        self.state, self.detail, self.failure = "restarting", RESTART_DETAIL, None
        self._end(True)

    def _end(self, again: bool) -> None:
        """Add the ended manager's counters to those of earlier ones, and count a restart if `again`."""
        self.replica = None
        self._before = msgspec.structs.replace(self.stats(), **dict.fromkeys(GAUGES, 0))
        self._now = Stats(pages_total=self._now.pages_total)
        self.restarts += again

    def pause(self) -> float:
        """Return the seconds to wait before the next start: 0 after the first death in the window, then increasing."""
        times = len(self._deaths) - 2
        return min(FIRST_PAUSE_SECONDS * 2.0**times, MAX_RESTART_PAUSE_SECONDS) if times >= 0 else 0.0

    def _may_restart(self, *, counts: bool) -> bool:
        now = self._clock()
        for deaths in (self._deaths, self._counted):
            while deaths and now - deaths[0] > self._window:
                deaths.popleft()
        self._deaths.append(now)
        if counts:
            self._counted.append(now)
        return not counts or len(self._counted) <= self._max_restarts

    def _why(self, reason: str, started: bool) -> str:
        """Return the reason of a death, with the error that the process reported, if any."""
        if self.failure is None:
            return reason
        return f"{reason}: {self.failure}" if started else str(self.failure)


def sum_stats(stats: Iterable[Stats]) -> Stats:
    """Return the sum of each field."""
    rows = map(msgspec.structs.astuple, stats)
    return Stats(*(sum(column) for column in zip(*rows, strict=True)))


def combine_infos(infos: list[EngineInfo]) -> EngineInfo:
    """Combine the replicas' infos: sums of `num_pages` and `max_running`, minima of length and step limits.

    The other fields are the same for all replicas, or are taken from the first.
    """
    return msgspec.structs.replace(
        infos[0],
        num_pages=sum(info.num_pages for info in infos),
        max_running=sum(info.max_running for info in infos),
        max_model_len=min(info.max_model_len for info in infos),
        max_step_tokens=min(info.max_step_tokens for info in infos),
    )
