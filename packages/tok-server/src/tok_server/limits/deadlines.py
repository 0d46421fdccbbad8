"""Deadlines: end requests that take too long, with one timer for all open requests.

A timer for each request, as in `asyncio.timeout`, costs more than all other tracking of a request's time.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from tok_server.wire import limited


class Deadlines:
    """Deadlines of all requests of one event loop. `seconds`: time limit of each request."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: set[Deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0  # when the timer fires, by `time.monotonic`

    def start(self, started: float) -> Deadline:
        """Return a context manager that raises ApiError (504) once the request's time is over.

        started  start of the request, by `time.monotonic`
        """
        return Deadline(self, started + self.seconds)

    def add(self, deadline: Deadline) -> None:
        """Start to watch a deadline."""
        self._open.add(deadline)
        if self._timer is None or deadline.when < self._fires_at:
            self._schedule(deadline.when)

    def remove(self, deadline: Deadline) -> None:
        """Stop watching a deadline."""
        self._open.discard(deadline)

    def _schedule(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = time.monotonic()
        for deadline in [one for one in self._open if one.when <= now]:
            self._open.discard(deadline)
            deadline.expire()
        if self._open:
            self._schedule(min(one.when for one in self._open))


class Deadline:
    """Time limit of the task that enters this context manager."""

    __slots__ = ("_cancel_requests", "_deadlines", "_expired", "_task", "when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self._deadlines = deadlines
        self._expired = False
        self.when = when

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancel_requests = task.cancelling()  # cancellation requests by others
        self._deadlines.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.remove(self)
        # If others have cancelled the task, too, the cancellation propagates instead.
        if self._expired and self._task.uncancel() <= self._cancel_requests and kind is asyncio.CancelledError:
            seconds = self._deadlines.seconds
            raise limited("request_timeout", 504, f"the request was not answered within {seconds:g} seconds") from error

    def expire(self) -> None:
        """Cancel the task: its time is over."""
        self._expired = True
        self._task.cancel()
