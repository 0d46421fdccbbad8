"""KnownPaths: requests whose method and whole path belong to one handler find it without a search for the route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiohttp import hdrs, web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Resolve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Known(NamedTuple):
    """A handler and, alike for all its requests, what aiohttp would have found."""

    handler: Handler
    found: web.UrlMappingMatchInfo


class KnownPaths:
    """What answers the requests of `app`, which has been set up and has one middleware.

    others  answers those that are not known: aiohttp's own search
    """

    def __init__(self, app: web.Application, others: Resolve) -> None:
        (self._around,) = app.middlewares
        self._others = others
        self._known: dict[tuple[str, str], _Known] = {}
        for route in app.router.routes():
            if isinstance(route.resource, web.PlainResource):
                found = web.UrlMappingMatchInfo({}, route)
                found.add_app(app)
                found.freeze()
                self._known[route.method, route.resource.canonical] = _Known(route.handler, found)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        known = self._known.get((request.method, request.path))
        if known is None or hdrs.EXPECT in request.headers:
            return await self._others(request)
        assert isinstance(request, web.Request)
        request._match_info = known.found
        return await self._around(request, known.handler)
