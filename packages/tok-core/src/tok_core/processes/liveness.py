"""Liveness: which process of a replica hangs, judged by the beats that each sends while its main loop turns.

Time is counted look by look, as `manager.watch.Watch` counts it: where a clock has jumped or the machine was suspended,
one look finds an hour gone, but no process has been silent for that hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tok_core.config import EngineConfig
from tok_core.manager import LOOK, MIN_IDLE_LOOKS
from tok_core.messages import Beat

SILENT = 10.0  # seconds without a sign of life after which a replica gets nothing new


class _Pulse:
    """The liveness of one process: seconds since it sent a beat, and since its main loop turned."""

    def __init__(self) -> None:
        self.turns = -1
        self.unheard = 0.0
        self.unturned = 0.0


class Liveness:
    """Judges the processes of one replica, by role. For one thread.

    starting  until `serve`: no single process has to get on, since some wait for others, but the replica has to
    """

    def __init__(self, roles: Iterable[str], config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._pulses = {role: _Pulse() for role in roles}
        self._step_timeout, self._start_timeout = config.step_timeout, config.start_timeout
        self._silent = min(SILENT, config.step_timeout / 2)
        self._most = min(LOOK, min(self._step_timeout, self._start_timeout) / MIN_IDLE_LOOKS)
        self._clock = clock
        self._looked = clock()
        self._unmoved = 0.0  # seconds since any process got on
        self.starting = True

    def hear(self, beat: Beat) -> None:
        """A beat has arrived."""
        pulse = self._pulses[beat.role]
        pulse.unheard = 0.0
        if beat.turns != pulse.turns:
            pulse.turns, pulse.unturned, self._unmoved = beat.turns, 0.0, 0.0

    def serve(self) -> None:
        """The replica has started."""
        self.starting = False
        for pulse in self._pulses.values():
            pulse.unheard = pulse.unturned = 0.0

    def look(self) -> None:
        """Count the time since the last look. To be called more often than any limit has passed."""
        now = self._clock()
        passed = min(max(now - self._looked, 0.0), self._most)
        self._looked = now
        self._unmoved += passed
        for pulse in self._pulses.values():
            pulse.unheard += passed
            pulse.unturned += passed

    @property
    def silent(self) -> str:
        """Which processes show no sign of life, in words; empty if all do.

        A worker that is busy with one long step still sends beats; a manager has no turn that long.
        """
        roles = [role for role, pulse in self._pulses.items() if self._is_silent(role, pulse)]
        if not roles:
            return ""
        return f"no sign of life from the {' and the '.join(roles)} process{'es' if len(roles) > 1 else ''}"

    @property
    def hung(self) -> str:
        """Why the replica has to be ended, in words; empty if it does not.

        A worker's loop may turn again after a step of up to `step_timeout` seconds: first-time compilation, long
        prompts and slow devices are within it.
        """
        if self.starting:
            if self._unmoved <= self._start_timeout:
                return ""
            silent = f", with {self.silent}" if self.silent else ""
            return f"the start made no progress for {self._start_timeout:g} s{silent}"
        role, pulse = max(self._pulses.items(), key=lambda one: (one[1].unturned > self._step_timeout, one[1].unheard))
        if pulse.unturned <= self._step_timeout:
            return ""
        return f"the {role} process hung for {self._step_timeout:g} s and was killed"

    def _is_silent(self, role: str, pulse: _Pulse) -> bool:
        loops = role == "manager" and not self.starting
        return (max(pulse.unheard, pulse.unturned) if loops else pulse.unheard) > self._silent
