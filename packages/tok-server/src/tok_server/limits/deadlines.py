"""Deadlines: requests that take too long are ended, with one timer for all that are open.

A timer for each, as of `asyncio.timeout`, costs more than all else that is known of a request's time.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from tok_server.wire import limited


class Deadlines:
    """Of all requests of one event loop. `seconds`: what each may take."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: set[Deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._rings = 0.0  # when the timer does

    def since(self, started: float) -> Deadline:
        """`with deadlines.since(request's start, as of time.monotonic):` raises ApiError (504) once it is over."""
        return Deadline(self, started + self.seconds)

    def add(self, deadline: Deadline) -> None:
        """It is to be kept from now on."""
        self._open.add(deadline)
        if self._timer is None or deadline.when < self._rings:
            self._wait_until(deadline.when)

    def remove(self, deadline: Deadline) -> None:
        """It has no meaning any more."""
        self._open.discard(deadline)

    def _wait_until(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = time.monotonic()
        for deadline in [one for one in self._open if one.when <= now]:
            self._open.discard(deadline)
            deadline.pass_by()
        if self._open:
            self._wait_until(min(one.when for one in self._open))


class Deadline:
    """Of the task that enters it."""

    __slots__ = ("_all", "_asked", "_passed", "_task", "when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self._all = deadlines
        self._passed = False
        self.when = when

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._asked = task.cancelling()  # to end, by others
        self._all.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._all.remove(self)
        # Others may have cancelled the task, too: then that is what happened.
        if self._passed and self._task.uncancel() <= self._asked and kind is asyncio.CancelledError:
            most = self._all.seconds
            raise limited("request_timeout", 504, f"the request was not answered within {most:g} seconds") from error

    def pass_by(self) -> None:
        """It is over: whatever the task waits for ends."""
        self._passed = True
        self._task.cancel()
