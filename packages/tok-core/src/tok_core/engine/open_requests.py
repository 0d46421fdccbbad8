"""OpenRequests: look up the requests of an engine that have not ended, by number and by id."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tok_core.engine.requests import OpenRequest
from tok_core.errors import InvalidField


class OpenRequests:
    """Thread-safe collection of open requests. `changed` is the engine's lock, notified of every removal.

    by_rid      requests by the engine's number; read it under the lock
    each_token  numbers of the requests that need every token: streamed ones, and those with log-probabilities
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._by_id: dict[str, OpenRequest] = {}
        self.by_rid: dict[int, OpenRequest] = {}
        self.each_token: set[int] = set()

    def __len__(self) -> int:
        return len(self.by_rid)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, request: OpenRequest) -> None:
        """Add a request. Raise InvalidField if an open request has its id."""
        with self._changed:
            if request.request_id in self._by_id:
                raise InvalidField("request_id", request.request_id, "an id that no open request has")
            self.by_rid[request.rid] = self._by_id[request.request_id] = request
            if request.each_token:
                self.each_token.add(request.rid)

    def remove(self, requests: Iterable[OpenRequest]) -> list[OpenRequest]:
        """Remove requests; return those that were open."""
        with self._changed:
            gone = [request for request in requests if self.by_rid.pop(request.rid, None) is not None]
            for request in gone:
                del self._by_id[request.request_id]
                self.each_token.discard(request.rid)
            if gone:
                self._changed.notify_all()
            return gone

    def named(self, request_id: str) -> OpenRequest | None:
        """Return the request with this id, if it is open."""
        with self._changed:
            return self._by_id.get(request_id)

    def some(self, rids: Iterable[int]) -> list[OpenRequest]:
        """Return the requests among `rids` that are still open, in the order of `rids`."""
        with self._changed:
            return [self.by_rid[rid] for rid in rids if rid in self.by_rid]

    def all(self) -> list[OpenRequest]:
        """Return all open requests."""
        with self._changed:
            return list(self.by_rid.values())

    def of_replica(self, replica: int) -> list[OpenRequest]:
        """Return the requests with a part assigned to the replica."""
        with self._changed:
            every = self.by_rid.values()
            return [one for one in every if any(part.replica == replica for part in one.parts)]
