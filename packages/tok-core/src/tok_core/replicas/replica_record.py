"""State, failures and counters of one replica through its restarts."""

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
"""Unresponsive: a process of it shows no sign of life, and it gets nothing new until all do again or it is killed.
Draining: it ends what it computes, and gets nothing new, until it is restarted."""

GAUGES = (
    *("requests_running", "requests_waiting", "sequences_running"),
    *("pages_total", "pages_used", "pages_cached", "steps_in_flight"),
)
"""Fields of `Stats` that are no counters."""

RESTART = "it was asked to restart"

FIRST_PAUSE = 0.5  # seconds before the second start within the window; each further one waits twice as long
MAX_RESTART_PAUSE_SECONDS = 30.0


class ReplicaRecord:
    """One replica through its deaths. Changed by `ReplicaSet` only, under its lock.

    replica   what runs; None while nothing does
    failure   what the replica itself said of why it ends
    """

    def __init__(
        self, number: int, most_restarts: int, window: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.number = number
        self.replica: Replica | None = None
        self.state: ReplicaState = "starting"
        self.detail = ""
        self.failure: TokError | None = None
        self.info: EngineInfo | None = None
        self.restarts = 0
        self._most_restarts = most_restarts
        self._window = window
        self._clock = clock
        self._deaths: deque[float] = deque()  # within the window
        self._counted: deque[float] = deque()  # those of them that count against the restarts allowed
        self._before = Stats()  # counters of the managers before this one
        self._now = Stats()

    def be_ready(self, info: EngineInfo) -> None:
        """It serves."""
        self.info, self.state, self.detail = info, "ready", ""

    def count(self, stats: Stats) -> None:
        """What its manager has reported."""
        self._now = stats

    def stats(self) -> Stats:
        """Counters since its first start, and gauges."""
        return total((self._before, self._now))

    def die(self, reason: str, *, by_request: bool = False) -> bool:
        """Note that it has ended; return whether it is to be started anew.

        by_request  what it was asked to compute is to blame: once it has served, that does not count against the
                    restarts allowed
        """
        started = self.state != "starting"
        again = started and self._may_restart(counts=not by_request or self.state == "restarting")
        self.state, self.detail = "restarting" if again else "failed", self._why(reason, started)
        self._end(again)
        return again

    def hear(self, silence: Silence) -> None:
        """Processes of it have fallen silent, or are heard again."""
        if silence.detail and self.state == "ready":
            self.state = "unresponsive"
        elif not silence.detail and self.state == "unresponsive":
            self.state = "ready"
        elif self.state != "starting":
            return
        self.detail = silence.detail

    def drain(self) -> None:
        """It is to end what it computes, and to be started anew after that."""
        self.state, self.detail = "draining", RESTART

    def retire(self) -> None:
        """It was ended in order to be started anew."""
        self.state, self.detail, self.failure = "restarting", RESTART, None
        self._end(True)

    def _end(self, again: bool) -> None:
        """What has been counted stays so."""
        self.replica = None
        self._before = msgspec.structs.replace(self.stats(), **dict.fromkeys(GAUGES, 0))
        self._now = Stats(pages_total=self._now.pages_total)
        self.restarts += again

    def pause(self) -> float:
        """Seconds to wait before the next start: none after a first death, then ever more."""
        times = len(self._deaths) - 2
        return min(FIRST_PAUSE * 2.0**times, MAX_RESTART_PAUSE_SECONDS) if times >= 0 else 0.0

    def _may_restart(self, *, counts: bool) -> bool:
        now = self._clock()
        for deaths in (self._deaths, self._counted):
            while deaths and now - deaths[0] > self._window:
                deaths.popleft()
        self._deaths.append(now)
        if counts:
            self._counted.append(now)
        return not counts or len(self._counted) <= self._most_restarts

    def _why(self, reason: str, started: bool) -> str:
        """What to tell of a death: the process's own words where it had any."""
        if self.failure is None:
            return reason
        return f"{reason}: {self.failure}" if started else str(self.failure)


def total(stats: Iterable[Stats]) -> Stats:
    """The sum, field by field."""
    each = [msgspec.structs.astuple(one) for one in stats]
    return Stats(*(sum(values) for values in zip(*each, strict=True)))
