"""/metrics: counters, gauges and histograms in Prometheus' text format."""

from __future__ import annotations

from aiohttp import web

from tok_server.http import CONTEXT
from tok_server.wire import Operation, raw


async def metrics(request: web.Request) -> web.Response:
    """Return metrics in Prometheus' text format."""
    body = request.app[CONTEXT].metrics.render()
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=body, headers=headers)


OPERATIONS = (Operation("GET", "/metrics", metrics, answers={200: raw("text/plain")}),)
