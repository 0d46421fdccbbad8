"""The HTTP application: which URL is answered by what, and what all answers have in common."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from tok_core import AsyncEngine
from tok_server import auth, chat, completions, models
from tok_server.answer import FAILED, REQUEST_ID, STARTED
from tok_server.context import CONTEXT, Context
from tok_server.errors import of_exception
from tok_server.ids import new_id
from tok_server.metrics import EngineStats, Metrics
from tok_server.settings import Settings
from tok_server.wire import encode

log = logging.getLogger("tok.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CLIENT_GONE = 499  # in log and metrics only: nobody is left to read a status


def make_app(engine: AsyncEngine, settings: Settings, *, ready: bool = True) -> web.Application:
    """The application that serves `engine`.

    ready  the engine has been started; otherwise set `app[CONTEXT].ready` once it has. The engine stays the
           caller's to start and to close. Run it with `handler_cancellation=True`: that is how a client which
           goes away aborts its request.
    """
    app = web.Application(client_max_size=settings.max_body, middlewares=[_common])
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="tok-server")
    context = Context(engine, settings, Metrics(lambda: _stats(context)), pool, ready=ready)
    app[CONTEXT] = context
    app.add_routes(
        [
            web.post("/v1/completions", completions.create),
            web.post("/v1/chat/completions", chat.create),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{id:.+}", models.retrieve),
            web.get("/health", _health),
            web.get("/metrics", _metrics),
        ]
    )
    app.on_response_prepare.append(_name_request)
    app.cleanup_ctx.append(_close_pool)
    return app


def _stats(context: Context) -> EngineStats:
    if not context.ready:
        return EngineStats()
    return EngineStats(context.engine.stats(), context.engine.replica_stats())


async def _close_pool(app: web.Application) -> AsyncIterator[None]:
    yield
    app[CONTEXT].pool.shutdown(wait=False, cancel_futures=True)


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request[REQUEST_ID]


@web.middleware
async def _common(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Names, times, authorises, counts and logs a request, and puts every error in OpenAI's shape."""
    context = request.app[CONTEXT]
    request[REQUEST_ID] = new_id("req")
    request[STARTED] = time.monotonic()
    context.open_requests += 1
    status = CLIENT_GONE
    try:
        auth.check(context.settings.api_key, request.path, request.headers)
        response = await handler(request)
        status = request.get(FAILED, response.status)
        return response
    except ConnectionError as error:
        raise asyncio.CancelledError from error
    except Exception as error:
        failure = of_exception(error, request[REQUEST_ID])
        status = failure.status
        if status >= 500:
            trace = error if status == 500 else None
            log.error("%s: %s", request[REQUEST_ID], error or type(error).__name__, exc_info=trace)
        return failure.response()
    finally:
        context.open_requests -= 1
        _record(context, request, status)


def _record(context: Context, request: web.Request, status: int) -> None:
    resource = request.match_info.route.resource
    endpoint = resource.canonical if resource else "other"  # not the path: those have no bound
    seconds = time.monotonic() - request[STARTED]
    context.metrics.requests.labels(endpoint, str(status)).inc()
    context.metrics.seconds.labels(endpoint).observe(seconds)
    level = logging.DEBUG if endpoint in ("/health", "/metrics") else logging.INFO
    log.log(level, "%s %s %s: %d, %.3f s", request[REQUEST_ID], request.method, request.path, status, seconds)


async def _health(request: web.Request) -> web.Response:
    """200 while requests are taken, else 503; the body says why, and how each replica does."""
    context = request.app[CONTEXT]
    state = context.state
    health = context.engine.health()
    ok = context.ready and health.ok and not context.draining
    body = encode({"status": state, "detail": health.detail, "replicas": health.replicas})
    return web.Response(status=200 if ok else 503, body=body, content_type="application/json")


async def _metrics(request: web.Request) -> web.Response:
    body = request.app[CONTEXT].metrics.render()
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=body, headers=headers)
