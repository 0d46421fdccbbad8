"""Dispatch open requests to replicas, hold them while no replica is ready, and dispatch again after a death."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from tok_core.engine.checks import min_output_tokens
from tok_core.engine.open_requests import OpenRequest, OpenRequests, RequestPart, notify, reported_error
from tok_core.errors import EngineClosed, EngineDead
from tok_core.messages import Cancel, EngineInfo, Int32, Progress, Submit, array
from tok_core.replicas import ReplicaSet, Router, RoutingRequest

log = logging.getLogger("tok_core")


class Dispatcher:
    """Thread-safe dispatcher of requests to replicas.

    `lock` is the engine's. Lock order: a request's own lock, then the engine's.
    """

    def __init__(self, replica_set: ReplicaSet, router: Router, requests: OpenRequests, lock: threading.RLock) -> None:
        self._replica_set = replica_set
        self._router = router
        self._requests = requests
        self._lock = lock
        self.held: list[tuple[OpenRequest, RoutingRequest]] = []  # open requests that wait for a replica to be ready
        self.holding = False  # whether new requests are held, too

    @property
    def info(self) -> EngineInfo:
        """Return the engine's properties. Raise EngineClosed before the engine is ready."""
        if self._replica_set.info is None:
            raise EngineClosed("the engine has not been started")
        return self._replica_set.info

    def require_ready(self) -> None:
        """Raise EngineClosed or EngineDead if no replica serves."""
        if self._replica_set.serves:  # the common case needs no lock, which other threads may hold
            return
        with self._lock:
            state, detail = self._replica_set.state, self._replica_set.detail
            if state == "ready":
                return
            if state == "closed":
                raise EngineClosed(detail)
            raise EngineDead(f"the engine is {state}" + (f": {detail}" if detail else ""))

    def routing_request(self, request: OpenRequest, tokens: Int32) -> RoutingRequest:
        """Return the properties by which the router chooses replicas. `tokens`: the request's prompt."""
        max_output = self.info.max_model_len - len(tokens)
        return self._router.routing_request(request.rid, tokens, request.params, max_output, request.salt)

    def open(self, request: OpenRequest, routing: RoutingRequest | None, *, later: bool = False) -> None:
        """Register the request and dispatch it to replicas; if `routing` is None, a later call dispatches it.

        Raises InvalidField for an id that is in use, and as `require_ready` does.
        """
        with self._lock:
            self.require_ready()
            self._requests.add(request)
            try:
                if routing is not None and self.holding:
                    self.held.append((request, routing))
                elif routing is not None:
                    self._dispatch(request, routing, later=later)
            except BaseException:
                self.withdraw(request)
                raise

    def dispatch_or_hold(self, request: OpenRequest, routing: RoutingRequest) -> None:
        """Dispatch a registered request, or hold it while no replica is ready. Raise EngineDead if none will be."""
        with self._lock:
            if self.holding or self._replica_set.state in ("restarting", "unresponsive"):
                self.held.append((request, routing))
                return
            self.require_ready()
            self._dispatch(request, routing)

    def dispatch_held(self) -> None:
        """Dispatch held requests. Called when a replica serves again, or will not be restarted."""
        with self._lock:
            held, self.held = self.held, []
        for request, routing in held:
            with request.lock:
                if request.ended():
                    continue
                try:
                    self.dispatch_or_hold(request, routing)
                    continue
                except Exception as error:
                    self.withdraw(request)
                    request.fail(reported_error(error))
            notify([request])

    def release(self) -> None:
        """Stop holding new requests, and dispatch the held ones."""
        self.holding = False
        self.dispatch_held()

    def any_dispatched(self) -> bool:
        """Return whether any open request is at a replica."""
        with self._lock:
            return any(request.parts for request in self._requests.by_rid.values())

    def remove(self, requests: Sequence[OpenRequest]) -> None:
        """Remove ended requests."""
        with self._lock:
            gone = self._requests.remove(requests)
            if self._router.several:
                for request in gone:
                    for part in request.parts:
                        self._router.remove(part.replica, request.rid)

    def withdraw(self, request: OpenRequest) -> None:
        """Remove the request, and cancel it at its replicas."""
        with self._lock:
            self.remove([request])
            for index, part in enumerate(request.parts):
                self._replica_set.send(part.replica, Cancel(part_number(request.rid, index)))

    def computes(self, replica: int) -> bool:
        """Return whether the replica has any sample left to compute."""
        with self._lock:
            requests = self._requests.by_rid.values()
            parts = ((request, part) for request in requests for part in request.parts if part.replica == replica)
            return any(request.error is None and request.runs(part.samples) for request, part in parts)

    def replica_lost(self, replica: int, reason: str) -> None:
        """Dispatch the open requests of a dead replica again, or fail them with EngineDead.

        A request fails if its owner has been notified of output of the lost samples, or if it was dispatched again
        before.
        """
        with self._lock:
            self._router.remove_replica(replica)
            requests = self._requests.of_replica(replica)
            priority = min((request.params.priority for request in requests if request.error is None), default=None)
        which = f" (replica {replica})" if self._router.several else ""
        error = EngineDead(f"the request was open when {reason}{which}", priority)
        notify([request for request in requests if not self._redispatch_or_fail(request, replica, error)])

    def _dispatch(self, request: OpenRequest, routing: RoutingRequest, *, later: bool = False) -> None:
        split = request.params.prompt_logprobs is None  # else each replica would compute the prompt's log-probabilities
        shares = self._router.assign(routing, range(request.params.n), self._replica_set.ready(), split=split)
        request.parts = [RequestPart(*share) for share in shares]
        for index in range(len(shares)):
            self._send(request, index, routing.tokens, later=later)

    def _send(self, request: OpenRequest, index: int, tokens: Int32, *, later: bool = False) -> None:
        part, params = request.parts[index], request.params
        if len(part.samples) != params.n:
            params = msgspec.structs.replace(params, n=len(part.samples))
        number, first = part_number(request.rid, index), part.samples.start
        caller = request.tenant, request.salt
        message = Submit(number, tokens, params, first, request.pooling, *caller, request.banned)
        self._replica_set.send(part.replica, message, later=later)

    def _redispatch_or_fail(self, request: OpenRequest, replica: int, error: EngineDead) -> bool:
        """Dispatch the request's lost parts again and return True, or fail it and return False."""
        with request.lock:
            try:
                if request.ended() or self._redispatch(request, replica):
                    return True
            except Exception:
                log.exception("request %s cannot be dispatched again", request.request_id)
            self.withdraw(request)
            request.fail(
                EngineDead(str(error), error.min_open_priority)
            )  # a copy each, since raising one sets its traceback
            return False

    def _redispatch(self, request: OpenRequest, lost: int) -> bool:
        """Dispatch the request's parts of a dead replica to others, each part at most once; False if not possible."""
        with self._lock:
            ready = self._replica_set.ready()
            parts = enumerate(request.parts)
            indices = [index for index, part in parts if part.replica == lost and request.runs(part.samples)]
            if not indices:
                return True  # its samples on that replica had all ended
            if (
                not ready
                or self.info.max_model_len - len(request.prompt) < min_output_tokens(request.params)
                or any(request.parts[index].redispatched for index in indices)
            ):
                return False
            if not all(request.restart(request.parts[index].samples) for index in indices):
                return False
            self._router.remove(lost, request.rid)
            routing = self.routing_request(request, array(request.prompt))
            for index in indices:
                (share,) = self._router.assign(routing, request.parts[index].samples, ready, split=False)
                request.parts[index] = RequestPart(*share, redispatched=True)
                self._send(request, index, routing.tokens)
            return True


REQUEST_BITS = 40  # bits of a part's number that hold the number of its request
REQUEST_MASK = (1 << REQUEST_BITS) - 1


def part_number(rid: int, index: int) -> int:
    """Return the number by which managers know part `index` of a request: `rid | index << REQUEST_BITS`.

    The index is needed since one replica may have two parts of a request, after another replica died.
    """
    return rid | index << REQUEST_BITS


def number_by_request(progress: Progress) -> Progress:
    """Return a manager's report with the numbers of parts replaced by those of their requests."""
    for entry in (*progress.finished, *progress.prompt_outputs()):
        entry.rid &= REQUEST_MASK
    failed = [(rid & REQUEST_MASK, reason) for rid, reason in progress.failed]
    refused = [(rid & REQUEST_MASK, allowed) for rid, allowed in progress.refused]
    started = [entry for entry in progress.started if entry[0] <= REQUEST_MASK]  # of part 0 only
    rids = progress.rid & np.int64(REQUEST_MASK)
    return msgspec.structs.replace(progress, rid=rids, started=started, failed=failed, refused=refused)
