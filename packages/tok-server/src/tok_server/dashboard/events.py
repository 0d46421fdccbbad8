"""The dashboard: its page, and /dashboard/events: the history once, then one sample per second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from aiohttp import web

from tok_server.batch import BatchStats
from tok_server.dashboard.feed import Feed
from tok_server.http import Context
from tok_server.observability import EngineStats
from tok_server.openai import STREAM_HEADERS
from tok_server.wire import Handler

FEED = web.AppKey("FEED", Feed)

FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard/style.css": ("style.css", "text/css"),
    "/dashboard/script.js": ("script.js", "text/javascript"),
    "/dashboard/cards.js": ("cards.js", "text/javascript"),
    "/dashboard/chart.js": ("chart.js", "text/javascript"),
    "/dashboard/chat.js": ("chat.js", "text/javascript"),
    "/dashboard/connect.js": ("connect.js", "text/javascript"),
    "/dashboard/events.js": ("events.js", "text/javascript"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""URL -> file and content type. Served without a key (`ApiKeys.add_public_paths`)."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_dashboard(
    app: web.Application,
    context: Context,
    stats: Callable[[], EngineStats],
    batches: Callable[[], BatchStats | None],
) -> None:
    """Serve the page at / and its event stream. Neither is part of the API or of /openapi.json."""
    context.keys.add_public_paths(FILES)  # static files reveal nothing about the server
    app.add_routes([*routes(), web.get("/dashboard/events", events, allow_head=False)])
    app.cleanup_ctx.append(partial(_run_feed, partial(Feed, context, stats, batches)))
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


async def _run_feed(make_feed: Callable[[], Feed], app: web.Application) -> AsyncIterator[None]:
    feed = app[FEED] = make_feed()
    feed.tick()
    task = asyncio.create_task(feed.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _close(app: web.Application) -> None:
    app[FEED].close()


def routes() -> list[web.RouteDef]:
    """Return a route for each file. The files are read once, here."""
    return [web.get(url, _handler(name, kind)) for url, (name, kind) in FILES.items()]


def _handler(name: str, kind: str) -> Handler:
    body = (Path(__file__).parent / "page" / name).read_bytes()

    async def file(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return file
