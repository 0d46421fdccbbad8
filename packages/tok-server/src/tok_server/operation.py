"""Endpoints for operators: health, version, metrics, the API's description, administration.

/admin/ is for clients with the admin key (`tok_server.http.access`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import cached_property, partial
from importlib.metadata import version

import msgspec
from aiohttp import web

from tok_client.types import HealthReport, LoadReport, ReadyReport, ReplicaReport, VersionReport
from tok_server.http import CONTEXT, Context
from tok_server.wire import (
    JSON,
    ApiError,
    Media,
    Operation,
    encode,
    invalid,
    json_of,
    json_response,
    openapi_document,
    raw,
    read_query,
)

log = logging.getLogger("tok.server")


async def health(request: web.Request) -> web.Response:
    """Report health: 200 while requests are accepted, else 503, with the reason and each replica's state."""
    context = request.app[CONTEXT]
    health_report = context.engine.health()
    replicas = [ReplicaReport(state=one.state, detail=one.detail) for one in health_report.replicas]
    return _report(context, HealthReport(status=context.state, detail=health_report.detail, replicas=replicas))


async def ready(request: web.Request) -> web.Response:
    """Report readiness in one word, for load balancers and probes: 200 while requests are accepted, else 503."""
    context = request.app[CONTEXT]
    return _report(context, ReadyReport(ready=accepts_requests(context), status=context.state))


async def load(request: web.Request) -> web.Response:
    """Return how many prompts clients wait for, batch lines excluded."""
    return json_response(LoadReport(server_load=request.app[CONTEXT].open_prompts.total()))


async def version_of_server(request: web.Request) -> web.Response:
    """Return the server's version."""
    return json_response(VersionReport(version=version("tok-server")))


def accepts_requests(context: Context) -> bool:
    """Return whether a request that arrives now would be accepted."""
    return context.ready and not context.draining and context.engine.health().ok


def _report(context: Context, report: HealthReport | ReadyReport) -> web.Response:
    return json_response(report, 200 if accepts_requests(context) else 503)


async def metrics(request: web.Request) -> web.Response:
    """Return metrics in Prometheus' text format."""
    body = request.app[CONTEXT].metrics.render()
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=body, headers=headers)


class OpenAPIDocument:
    """The OpenAPI document of one application, encoded on its first request. `authorised`: clients must send a key."""

    def __init__(self, operations: Sequence[Operation], *, authorised: bool) -> None:
        self._operations = operations
        self._authorised = authorised

    @cached_property
    def body(self) -> bytes:
        """Return the document as JSON."""
        return encode(openapi_document(self._operations, version=version("tok-server"), authorised=self._authorised))


DOCUMENT = web.AppKey("DOCUMENT", OpenAPIDocument)


async def openapi(request: web.Request) -> web.Response:
    """Return this document."""
    return web.Response(body=request.app[DOCUMENT].body, content_type=JSON)


class RestartReplica(msgspec.Struct, frozen=True):
    """Query of `POST /admin/replicas/{number}/restart`.

    drain  seconds that the replica's open requests get to finish; absent: `request_timeout`, or 0 if the replica is
           unresponsive
    """

    drain: float | None = None


async def restart_replica(request: web.Request) -> web.Response:
    """Restart a replica after its open requests have finished.

    Answers when the replica serves again. Meanwhile the other replicas take new requests; with one replica only, new
    requests get 503. `drain=SECONDS` limits the wait for open requests; 0 restarts the replica at once.
    """
    context = request.app[CONTEXT]
    context.require_started()
    replicas = context.engine.health().replicas
    number = _replica_number(request, len(replicas))
    drain = read_query(request, RestartReplica).drain
    if drain is not None and not 0 <= drain < math.inf:
        raise invalid("drain", f"drain is {drain}; allowed: seconds from 0")
    if (state := replicas[number].state) not in ("ready", "unresponsive", "failed"):
        raise ApiError(409, f"replica {number} is already {state}", code="restarting")
    if drain is None:
        drain = 0.0 if state == "unresponsive" else context.settings.request_timeout
    # The restart continues even if the client that asked for it disconnects.
    restart = asyncio.ensure_future(context.engine.restart_replica(number, drain=drain))
    context.background.add(restart)
    restart.add_done_callback(partial(_log_restart, context, number))
    await asyncio.shield(restart)
    replica = context.engine.health().replicas[number]
    return json_response(ReplicaReport(state=replica.state, detail=replica.detail))


def _log_restart(context: Context, number: int, restart: asyncio.Future[None]) -> None:
    context.background.discard(restart)
    error = None if restart.cancelled() else restart.exception()
    log.info("restart of replica %d: %s", number, error or "succeeded")


def _replica_number(request: web.Request, count: int) -> int:
    text = request.match_info["number"]
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else count
    if number >= count:
        message = f"replica {text[:80]!r} does not exist; allowed: integers from 0 to {count - 1}"
        raise ApiError(404, message, param="number", code="not_found")
    return number


OPERATOR_OPERATIONS = (
    Operation("GET", "/health", health, answers={200: json_of(HealthReport), 503: json_of(HealthReport)}),
    Operation("GET", "/ping", health, answers={200: json_of(HealthReport), 503: json_of(HealthReport)}),
    Operation("GET", "/ready", ready, answers={200: json_of(ReadyReport), 503: json_of(ReadyReport)}),
    Operation("GET", "/load", load, answers={200: json_of(LoadReport)}),
    Operation("GET", "/version", version_of_server, answers={200: json_of(VersionReport)}),
    Operation("GET", "/metrics", metrics, answers={200: raw("text/plain")}),
    Operation("GET", "/openapi.json", openapi, answers={200: (Media(JSON, schema={"type": "object"}),)}),
    Operation(
        "POST",
        "/admin/replicas/{number}/restart",
        restart_replica,
        query=RestartReplica,
        answers={200: json_of(ReplicaReport)},
        errors=(400, 403, 404, 409),
    ),
)
