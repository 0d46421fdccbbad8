"""The dashboard's page: static files that load nothing from other servers."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from tok_server.wire import Handler

FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard/style.css": ("style.css", "text/css"),
    "/dashboard/script.js": ("script.js", "text/javascript"),
    "/dashboard/chart.js": ("chart.js", "text/javascript"),
    "/dashboard/chat.js": ("chat.js", "text/javascript"),
    "/dashboard/events.js": ("events.js", "text/javascript"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""URL -> file and content type. Served without a key (`ApiKeys.add_public_paths`)."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[web.RouteDef]:
    """Return a route for each file. The files are read once, here."""
    return [web.get(url, _handler(name, kind)) for url, (name, kind) in FILES.items()]


def _handler(name: str, kind: str) -> Handler:
    body = (Path(__file__).parent / "page" / name).read_bytes()

    async def file(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return file
