"""Collect requests that raised an exception within the manager, so that each of them fails alone."""

from __future__ import annotations

import logging

log = logging.getLogger("tok_core")


class FaultyRequest(Exception):
    """Error of the request `rid`, raised by code that looks at several requests and has not changed anything yet."""

    def __init__(self, rid: int, error: Exception) -> None:
        super().__init__(f"request {rid}: {error}")
        self.rid = rid
        self.error = error


class Faults:
    """Exceptions by request. An exception that belongs to no known request is not caught and ends the replica.

    The manager ends faulty requests after the step that it is building. Until then, all that they hold stays in place.
    """

    def __init__(self) -> None:
        self._found: dict[int, Exception] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, rid: int, error: Exception) -> None:
        """Record why the request cannot go on; the first reason counts."""
        log.error("request %d cannot be computed", rid, exc_info=error)
        self._found.setdefault(rid, error)

    def take(self) -> list[tuple[int, str]]:
        """Remove and return the requests, each with the reason to report."""
        found, self._found = self._found, {}
        return [
            (rid, f"the request cannot be computed: {type(error).__name__}: {error}") for rid, error in found.items()
        ]
