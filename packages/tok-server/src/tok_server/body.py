"""A request's body: read within limits of size and time, and split into its members."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from tok_server.errors import ApiError, invalid
from tok_server.wire import BadJson, decode

Members = dict[str, msgspec.Raw]


async def read_body(request: web.Request, timeout: float) -> bytes:
    """The body's bytes. Errors: ApiError 400 (content type, cut short), 408 (slow), 413 (large)."""
    kind = request.content_type
    if "Content-Type" in request.headers and kind != "application/json":
        raise invalid("Content-Type", f"Content-Type is {kind!r}; allowed: application/json")
    try:
        async with asyncio.timeout(timeout):
            return await request.read()
    except TimeoutError as error:
        message = f"the body did not arrive within {timeout:g} seconds"
        raise ApiError(408, message, code="request_timeout") from error
    except web.RequestPayloadError as error:
        raise invalid(None, f"the body cannot be read: {error}") from error


def members(body: bytes) -> Members:
    """The body's members by name, their values not yet decoded. Errors: ApiError 400."""
    if not body:
        raise invalid(None, "the body is empty; expected is a JSON object")
    try:
        body.decode()  # also what no field reads is to be valid
        return decode(body, Members)
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except BadJson as error:
        raise invalid(error.path, str(error)) from error
