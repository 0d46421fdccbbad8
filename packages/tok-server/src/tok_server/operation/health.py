"""/health and /ready: whether the server accepts requests; /version: the server's version."""

from __future__ import annotations

from importlib.metadata import version

from aiohttp import web

from tok_client.types import HealthReport, ReadyReport, ReplicaReport, VersionReport
from tok_server.http import CONTEXT, Context
from tok_server.wire import Operation, encode, json_of


async def health(request: web.Request) -> web.Response:
    """Report health: 200 while requests are accepted, else 503, with the reason and each replica's state."""
    context = request.app[CONTEXT]
    health_report = context.engine.health()
    replicas = [ReplicaReport(state=one.state, detail=one.detail) for one in health_report.replicas]
    return _json(context, HealthReport(status=context.state, detail=health_report.detail, replicas=replicas))


async def ready(request: web.Request) -> web.Response:
    """Report readiness in one word, for load balancers and probes: 200 while requests are accepted, else 503."""
    context = request.app[CONTEXT]
    return _json(context, ReadyReport(ready=accepts_requests(context), status=context.state))


async def version_of_server(request: web.Request) -> web.Response:
    """Return the server's version."""
    body = encode(VersionReport(version=version("tok-server")))
    return web.Response(body=body, content_type="application/json")


def accepts_requests(context: Context) -> bool:
    """Return whether a request that arrives now would be accepted."""
    return context.ready and not context.draining and context.engine.health().ok


def _json(context: Context, report: HealthReport | ReadyReport) -> web.Response:
    status = 200 if accepts_requests(context) else 503
    return web.Response(status=status, body=encode(report), content_type="application/json")


OPERATIONS = (
    Operation("GET", "/health", health, answers={200: json_of(HealthReport), 503: json_of(HealthReport)}),
    Operation("GET", "/ready", ready, answers={200: json_of(ReadyReport), 503: json_of(ReadyReport)}),
    Operation("GET", "/version", version_of_server, answers={200: json_of(VersionReport)}),
)
