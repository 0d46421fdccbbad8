"""/dashboard/events: the history once, then one sample per second, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

from aiohttp import web

from tok_server.dashboard import page
from tok_server.dashboard.feed import Feed
from tok_server.http import Context
from tok_server.observability import EngineStats
from tok_server.openai import STREAM_HEADERS

FEED = web.AppKey("FEED", Feed)


def add_dashboard(app: web.Application, context: Context, stats: Callable[[], EngineStats]) -> None:
    """Serve the page at / and its event stream. Neither is part of the API or of /openapi.json."""
    context.keys.add_public_paths(page.FILES)  # static files reveal nothing about the server
    app.add_routes([*page.routes(), web.get("/dashboard/events", events, allow_head=False)])
    app.cleanup_ctx.append(partial(_run_feed, context, stats))
    app.on_shutdown.append(_close)


async def events(request: web.Request) -> web.StreamResponse:
    """Stream events until the viewer disconnects or the server stops."""
    feed = request.app[FEED]
    response = web.StreamResponse(headers={**STREAM_HEADERS, "Cache-Control": "no-store"})
    await response.prepare(request)
    await response.write(feed.opening())
    while not feed.ended:
        await feed.wait_for_tick()
        # A viewer too slow for one sample per second misses some, so that no queue grows.
        await response.write(feed.sample())
    await response.write_eof()
    return response


async def _run_feed(context: Context, stats: Callable[[], EngineStats], app: web.Application) -> AsyncIterator[None]:
    feed = app[FEED] = Feed(context, stats)
    feed.tick()
    task = asyncio.create_task(feed.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _close(app: web.Application) -> None:
    app[FEED].close()
