"""Known paths: what is answered without a search for the route, and what is left to that."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from tok_server.known_paths import Handler, KnownPaths

APP = web.AppKey("APP", str)


async def _named(request: web.Request) -> web.Response:
    """Says of which application it is, and at which route it was found."""
    resource = request.match_info.route.resource
    assert resource is not None
    return web.Response(text=f"{request.app[APP]}: {resource.canonical}")


async def _search(request: web.BaseRequest) -> web.Response:
    return web.Response(status=404, text="searched")


@web.middleware
async def _around(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    response.headers["x-around"] = "yes"
    return response


@pytest.fixture
async def known() -> AsyncIterator[KnownPaths]:
    app = web.Application(middlewares=[_around])
    app[APP] = "ours"
    app.add_routes([web.get("/here", _named), web.get("/there/{number}", _named)])
    runner = web.AppRunner(app)
    await runner.setup()
    yield KnownPaths(app, _search)
    await runner.cleanup()


async def test_a_known_path_is_answered_by_its_handler_within_the_middleware(known: KnownPaths) -> None:
    for method, path in (("GET", "/here"), ("GET", "/here?more=1"), ("HEAD", "/here")):
        response = await known(make_mocked_request(method, path))
        assert isinstance(response, web.Response)
        assert (response.text, response.headers["x-around"]) == ("ours: /here", "yes")


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/here", {}),
        ("GET", "/here/", {}),
        ("GET", "/there/5", {}),
        ("GET", "/there/{number}", {}),
        ("GET", "/here", {"Expect": "100-continue"}),
    ],
)
async def test_all_else_is_searched_for(known: KnownPaths, method: str, path: str, headers: dict[str, str]) -> None:
    response = await known(make_mocked_request(method, path, headers=headers))
    assert isinstance(response, web.Response)
    assert response.text == "searched"
