"""Detect failures: requests that cannot go on, and a worker that is stuck."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from tok_core.errors import EngineDead

log = logging.getLogger("tok_core")


class FaultyRequest(Exception):
    """Error of the request `rid`, raised by code that looks at several requests and has not changed anything yet."""

    def __init__(self, rid: int, error: Exception) -> None:
        super().__init__(f"request {rid}: {error}")
        self.rid = rid
        self.error = error


class Failures(NamedTuple):
    """Requests that end with an error: `failed` ones with the reason, `refused` ones with what is allowed instead."""

    failed: list[tuple[int, str]]
    refused: list[tuple[int, str]]


class Faults:
    """Requests that cannot go on, until the manager cancels and reports them; each of them fails alone.

    Until then, all that they hold stays in place. An exception that belongs to no known request is not caught and ends
    the replica.
    """

    def __init__(self) -> None:
        self._failed: dict[int, str] = {}
        self._refused: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._failed or self._refused)

    def add(self, rid: int, error: Exception) -> None:
        """Fail the request because of an exception, which is logged."""
        log.error("request %d cannot be computed", rid, exc_info=error)
        self.fail(rid, f"the request cannot be computed: {type(error).__name__}: {error}")

    def fail(self, rid: int, reason: str) -> None:
        """Fail the request; the first reason counts."""
        self._failed.setdefault(rid, reason)

    def refuse(self, rid: int, allowed: str) -> None:
        """Refuse the request, whose grammar exceeds a limit; `allowed` names what does not."""
        self._refused.setdefault(rid, allowed)

    def take(self) -> Failures:
        """Remove and return the requests."""
        failures = Failures(list(self._failed.items()), list(self._refused.items()))
        self._failed, self._refused = {}, {}
        return failures


MAX_LOOK_SECONDS = 2.0  # seconds that one look counts, at most
MIN_IDLE_LOOKS = 4  # looks without a returned step, at least, before a worker counts as stuck


class Watchdog:
    """Sum of the seconds for which steps have been at the worker and none has come back.

    After a jump of the clock or a suspension of the machine, an hour may have passed between two looks, but not for the
    worker. Each look therefore counts at most `MAX_LOOK_SECONDS` seconds.

    timeout  seconds after which the worker counts as stuck
    clock    returns seconds; may jump forwards and backwards, or stand still
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout
        self._most = min(MAX_LOOK_SECONDS, timeout / MIN_IDLE_LOOKS)
        self._clock = clock
        self._looked = clock()
        self._silent = 0.0

    def look(self, *, owing: bool) -> None:
        """Add the time since the last look; call this at least once a second. Raises EngineDead if the worker is stuck.

        `owing`: steps are at the worker, and none has come back since the last look.
        """
        now = self._clock()
        self._silent = self._silent + min(max(now - self._looked, 0.0), self._most) if owing else 0.0
        self._looked = now
        if self._silent > self._timeout:
            raise EngineDead(f"no step has come back for {self._timeout:g} s: the worker is stuck")
