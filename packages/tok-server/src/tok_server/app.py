"""Build the aiohttp application: routes, middleware, response headers and the context of the handlers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from tok_core import AsyncEngine
from tok_server.anthropic import ANTHROPIC_OPERATIONS
from tok_server.batch import BATCH_OPERATIONS, add_batches
from tok_server.dashboard import add_dashboard
from tok_server.http import CONTEXT, Context, request_middleware, set_response_headers
from tok_server.observability import EngineStats, Metrics
from tok_server.openai import OPENAI_OPERATIONS
from tok_server.operation import DOCUMENT, OPERATOR_OPERATIONS, OpenAPIDocument
from tok_server.rl import RL_OPERATIONS
from tok_server.settings import Settings
from tok_server.wire import OPENAI_ERRORS

OPERATIONS = (*OPENAI_OPERATIONS, *ANTHROPIC_OPERATIONS, *OPERATOR_OPERATIONS, *BATCH_OPERATIONS, *RL_OPERATIONS)
"""All operations of the API: routes and /openapi.json are made from this list."""


def make_app(engine: AsyncEngine, settings: Settings, *, ready: bool = True) -> web.Application:
    """Return the application that serves `engine`.

    ready  whether the engine has been started; otherwise set `app[CONTEXT].ready` once it has

    The caller starts and closes the engine. Run the application with `handler_cancellation=True`, so that a client that
    disconnects aborts its request.
    """
    app = web.Application(client_max_size=settings.max_body, middlewares=[request_middleware])
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="tok-server")
    context = Context(engine, settings, Metrics(lambda: _stats(context)), pool, ready=ready)
    context.error_formats = {one.path: one.error_format for one in OPERATIONS if one.error_format != OPENAI_ERRORS}
    app[CONTEXT] = context
    app[DOCUMENT] = OpenAPIDocument(OPERATIONS, authorised=bool(settings.api_keys))
    app.add_routes([one.route() for one in OPERATIONS])
    app.on_response_prepare.append(set_response_headers)
    app.cleanup_ctx.append(_close_pool)
    batches = add_batches(app, engine, settings)
    add_dashboard(app, context, lambda: _stats(context), batches)
    return app


def _stats(context: Context) -> EngineStats:
    if not context.ready:
        return EngineStats()
    return EngineStats(context.engine.stats(), context.engine.replica_stats())


async def _close_pool(app: web.Application) -> AsyncIterator[None]:
    yield
    context = app[CONTEXT]
    context.pool.shutdown(wait=False, cancel_futures=True)
    if context.telemetry is not None:
        await asyncio.to_thread(context.telemetry.close)
