"""/openapi.json: the OpenAPI description of the API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version

from aiohttp import web

from tok_server.wire import JSON, Media, Operation, encode, openapi_document


class OpenAPIDocument:
    """The OpenAPI document of one application, encoded on its first request. `authorised`: clients must send a key."""

    def __init__(self, operations: Sequence[Operation], *, authorised: bool) -> None:
        self._operations = operations
        self._authorised = authorised

    @cached_property
    def body(self) -> bytes:
        """Return the document as JSON."""
        return encode(openapi_document(self._operations, version=version("tok-server"), authorised=self._authorised))


DOCUMENT = web.AppKey("DOCUMENT", OpenAPIDocument)


async def openapi(request: web.Request) -> web.Response:
    """Return this document."""
    return web.Response(body=request.app[DOCUMENT].body, content_type=JSON)


OPERATIONS = (Operation("GET", "/openapi.json", openapi, answers={200: (Media(JSON, schema={"type": "object"}),)}),)
