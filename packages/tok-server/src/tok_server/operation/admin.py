"""/admin/: operations on a running server, for clients with the admin key (`tok_server.http.auth`)."""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial

import msgspec
from aiohttp import web

from tok_client.types import ReplicaReport
from tok_server.http import CONTEXT, Context
from tok_server.wire import ApiError, Operation, encode, invalid, json_of, read_query

log = logging.getLogger("tok.server")


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
    return web.Response(
        body=encode(ReplicaReport(state=replica.state, detail=replica.detail)), content_type="application/json"
    )


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


OPERATIONS = (
    Operation(
        "POST",
        "/admin/replicas/{number}/restart",
        restart_replica,
        query=RestartReplica,
        answers={200: json_of(ReplicaReport)},
        errors=(400, 403, 404, 409),
    ),
)
