"""Read the reports of a replica's processes, and detect hung ones by the heartbeats that each sends.

Each call of `look` adds the time since the last call, but a few seconds at most, as in `tok_core.manager.faults`. If
the clock jumps by an hour or the machine is suspended, no process counts as silent for that hour.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from tok_core.config import EngineConfig
from tok_core.manager import MAX_LOOK_SECONDS, MIN_IDLE_LOOKS
from tok_core.messages import Beat, EngineInfo, FromProcess, Receiver, Silence, ToEngine

log = logging.getLogger("tok_core")

MAX_SILENT_SECONDS = 10.0  # a replica with a process without heartbeats for longer gets no new requests


class _Pulse:
    """Seconds since a process sent a heartbeat (`silent_seconds`), and since its main loop turned (`stuck_seconds`)."""

    def __init__(self) -> None:
        self.turns = -1
        self.silent_seconds = 0.0
        self.stuck_seconds = 0.0


class Liveness:
    """Heartbeat monitor of the processes of one replica, by role. For use by one thread.

    starting  True until `serve`. During a start, processes wait for each other, so only the replica as a whole has to
              make progress
    """

    def __init__(self, roles: Iterable[str], config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._pulses = {role: _Pulse() for role in roles}
        self._step_timeout, self._start_timeout = config.step_timeout, config.start_timeout
        self._max_silent_seconds = min(MAX_SILENT_SECONDS, config.step_timeout / 2)
        self._max_passed = min(MAX_LOOK_SECONDS, min(self._step_timeout, self._start_timeout) / MIN_IDLE_LOOKS)
        self._clock = clock
        self._last_look = clock()
        self._idle_seconds = 0.0  # seconds since any process made progress
        self.starting = True

    def record_beat(self, beat: Beat) -> None:
        """Record the arrival of a heartbeat."""
        pulse = self._pulses[beat.role]
        pulse.silent_seconds = 0.0
        if beat.turns != pulse.turns:
            pulse.turns, pulse.stuck_seconds, self._idle_seconds = beat.turns, 0.0, 0.0

    def serve(self) -> None:
        """End the start: from now on each process has to make progress."""
        self.starting = False
        for pulse in self._pulses.values():
            pulse.silent_seconds = pulse.stuck_seconds = 0.0

    def look(self) -> None:
        """Add the time since the last call. Call this several times within any limit."""
        now = self._clock()
        passed = min(max(now - self._last_look, 0.0), self._max_passed)
        self._last_look = now
        self._idle_seconds += passed
        for pulse in self._pulses.values():
            pulse.silent_seconds += passed
            pulse.stuck_seconds += passed

    @property
    def silent(self) -> str:
        """Return a message that names the silent processes; "" if none is silent.

        A worker that computes one long step still sends heartbeats. Turns of the manager's loop are short, so once
        started it also counts as silent if its count stands still.
        """
        roles = [role for role, pulse in self._pulses.items() if self._is_silent(role, pulse)]
        if not roles:
            return ""
        return f"no sign of life from the {' and the '.join(roles)} process{'es' if len(roles) > 1 else ''}"

    @property
    def hung(self) -> str:
        """Return the reason to end the replica; "" if there is none.

        A worker's loop may stand still for a step of up to `step_timeout` seconds, which allows for first-time
        compilation, long prompts and slow devices.
        """
        if self.starting:
            if self._idle_seconds <= self._start_timeout:
                return ""
            silent = f", with {self.silent}" if self.silent else ""
            return f"the start made no progress for {self._start_timeout:g} s{silent}"
        role, pulse = max(
            self._pulses.items(),
            key=lambda item: (item[1].stuck_seconds > self._step_timeout, item[1].silent_seconds),
        )
        if pulse.stuck_seconds <= self._step_timeout:
            return ""
        return f"the {role} process hung for {self._step_timeout:g} s and was killed"

    def _is_silent(self, role: str, pulse: _Pulse) -> bool:
        seconds = pulse.silent_seconds
        if role == "manager" and not self.starting:
            seconds = max(seconds, pulse.stuck_seconds)
        return seconds > self._max_silent_seconds


class ReportReader:
    """Reader of the reports of one replica's processes, which passes all but heartbeats to `report`."""

    def __init__(self, reports: Receiver[FromProcess], report: Callable[[ToEngine], None]) -> None:
        self._reports = reports
        self._report = report
        self._silent = ""

    def read(self, liveness: Liveness, seconds: float) -> None:
        """Read for `seconds`; pass heartbeats to `liveness`, and report processes that fall silent or resume them."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            message = self._reports.wait(left)
            if isinstance(message, Beat):
                liveness.record_beat(message)
            elif message is not None:
                if isinstance(message, EngineInfo):
                    liveness.serve()
                self._report(message)
        liveness.look()
        if liveness.silent != self._silent:
            self._silent = liveness.silent
            self._report(Silence(self._silent))

    def close(self) -> None:
        """Pass on the last reports of ended processes."""
        try:
            for message in self._reports.all():
                if not isinstance(message, Beat):
                    self._report(message)
        except Exception:
            log.exception("a last report of the engine's processes cannot be handled")
        self._reports.close()
