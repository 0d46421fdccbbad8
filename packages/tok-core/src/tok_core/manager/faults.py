"""Faults: requests that went wrong on their way through the manager, each of which is to fail alone."""

from __future__ import annotations

import logging

log = logging.getLogger("tok_core")


class FaultyRequest(Exception):
    """An `error` on the way of the request `rid`, raised where several are looked at and nothing has changed yet."""

    def __init__(self, rid: int, error: Exception) -> None:
        super().__init__(f"request {rid}: {error}")
        self.rid = rid
        self.error = error


class Faults:
    """Collects exceptions by request, where it is known whose they are. What is not caught ends the replica.

    The manager ends the requests after the step that it is making: until then all that they hold stays in place.
    """

    def __init__(self) -> None:
        self._found: dict[int, Exception] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, rid: int, error: Exception) -> None:
        """Note why the request cannot go on; the first reason counts."""
        log.error("request %d cannot be computed", rid, exc_info=error)
        self._found.setdefault(rid, error)

    def take(self) -> list[tuple[int, str]]:
        """Remove and return the requests, each with the reason to tell."""
        found, self._found = self._found, {}
        return [
            (rid, f"the request cannot be computed: {type(error).__name__}: {error}") for rid, error in found.items()
        ]
