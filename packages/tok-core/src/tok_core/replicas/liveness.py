"""Detect hung processes of a replica by the heartbeats that each sends.

Time is summed over calls of `look`, each of which counts a few seconds at most, as in `tok_core.manager.faults`. If
the clock jumps by an hour or the machine is suspended, no process counts as silent for that hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tok_core.config import EngineConfig
from tok_core.manager import MAX_LOOK_SECONDS, MIN_IDLE_LOOKS
from tok_core.messages import Beat

SILENT = 10.0  # seconds without a heartbeat after which a replica gets no new requests


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
        self._silent = min(SILENT, config.step_timeout / 2)
        self._most = min(MAX_LOOK_SECONDS, min(self._step_timeout, self._start_timeout) / MIN_IDLE_LOOKS)
        self._clock = clock
        self._looked = clock()
        self._unmoved = 0.0  # seconds since any process made progress
        self.starting = True

    def record_beat(self, beat: Beat) -> None:
        """Note the arrival of a heartbeat."""
        pulse = self._pulses[beat.role]
        pulse.silent_seconds = 0.0
        if beat.turns != pulse.turns:
            pulse.turns, pulse.stuck_seconds, self._unmoved = beat.turns, 0.0, 0.0

    def serve(self) -> None:
        """Note that the replica has started; from now on each process has to make progress."""
        self.starting = False
        for pulse in self._pulses.values():
            pulse.silent_seconds = pulse.stuck_seconds = 0.0

    def look(self) -> None:
        """Add the time since the last call. Call this several times within any limit."""
        now = self._clock()
        passed = min(max(now - self._looked, 0.0), self._most)
        self._looked = now
        self._unmoved += passed
        for pulse in self._pulses.values():
            pulse.silent_seconds += passed
            pulse.stuck_seconds += passed

    @property
    def silent(self) -> str:
        """Return which processes are silent, in words; "" if none is.

        A worker that computes one long step still sends heartbeats. Turns of the manager's loop are short, so once
        started it also counts as silent if its count stands still.
        """
        roles = [role for role, pulse in self._pulses.items() if self._is_silent(role, pulse)]
        if not roles:
            return ""
        return f"no sign of life from the {' and the '.join(roles)} process{'es' if len(roles) > 1 else ''}"

    @property
    def hung(self) -> str:
        """Return why the replica has to be ended, in words; "" if it does not.

        A worker's loop may stand still for a step of up to `step_timeout` seconds, which allows for first-time
        compilation, long prompts and slow devices.
        """
        if self.starting:
            if self._unmoved <= self._start_timeout:
                return ""
            silent = f", with {self.silent}" if self.silent else ""
            return f"the start made no progress for {self._start_timeout:g} s{silent}"
        role, pulse = max(
            self._pulses.items(), key=lambda one: (one[1].stuck_seconds > self._step_timeout, one[1].silent_seconds)
        )
        if pulse.stuck_seconds <= self._step_timeout:
            return ""
        return f"the {role} process hung for {self._step_timeout:g} s and was killed"

    def _is_silent(self, role: str, pulse: _Pulse) -> bool:
        loops = role == "manager" and not self.starting
        return (max(pulse.silent_seconds, pulse.stuck_seconds) if loops else pulse.silent_seconds) > self._silent
