"""Read a request's body within limits of size and time, and split it into its members."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from tok_server.http.context import Context
from tok_server.observability import COUNTS
from tok_server.wire import ApiError, BadJson, check_json, decode, invalid, limited, too_large

Members = dict[str, msgspec.Raw]

JSON = "application/json"
MAX_RATIO = 100  # unpacked bytes per packed byte; JSON lines have 5 to 40, DEFLATE reaches 1,032
UNPACKED_FREELY = 1 << 20  # bytes that may be unpacked at any ratio
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})


async def read_body(request: web.Request, context: Context) -> bytes:
    """Return the body's bytes. Errors: ApiError 400 (type, truncated), 408 (slow), 413 (large), 503 (too many held)."""
    given = request.headers.get("Content-Type", JSON)
    if given != JSON and (kind := request.content_type) != JSON:
        raise invalid("Content-Type", f"Content-Type is {kind!r}; allowed: {JSON}")
    try:
        if request.content.is_eof():  # the body arrived together with the head
            return _taken(request, context)
        async with asyncio.timeout(context.settings.body_timeout):
            return await _read(request, context)
    except TimeoutError as error:
        message = f"the body did not arrive within {context.settings.body_timeout:g} seconds"
        raise limited("body_timeout", 408, message, code="request_timeout") from error
    except web.RequestPayloadError as error:
        raise invalid(None, f"the body cannot be read: {error}") from error


def _taken(request: web.Request, context: Context) -> bytes:
    body = request.content.read_nowait()
    if len(body) > context.settings.max_body:
        raise too_large(context.settings.max_body)
    hold(request, context, len(body))
    return body


async def _read(request: web.Request, context: Context) -> bytes:
    most = context.settings.max_body
    if (request.content_length or 0) > most:
        raise too_large(most)
    parts = []
    size = 0
    async for part in request.content.iter_any():
        check_ratio(request)
        size += len(part)
        if size > most:
            raise too_large(most)
        hold(request, context, len(part))
        parts.append(part)
    return b"".join(parts)


def hold(request: web.Request, context: Context, size: int) -> None:
    """Count `size` more bytes of the body as held until the request ends. Errors: ApiError 503 beyond `max_bodies`."""
    most = context.settings.max_bodies
    if context.held_bytes + size > most:
        raise limited("max_bodies", 503, f"the bodies of open requests have {most} bytes already", retry_after=1)
    context.held_bytes += size
    request[COUNTS].held_bytes += size


def check_encoding(request: web.Request) -> None:
    """Raise ApiError (415) for a body in an unsupported encoding. Size limits apply to the unpacked body."""
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() not in ENCODINGS:
        message = f"Content-Encoding is {encoding[:80]!r}; allowed: identity, gzip, deflate"
        raise ApiError(415, message, param="Content-Encoding", code="unsupported_media_type")


def check_ratio(request: web.Request) -> None:
    """Raise ApiError (413) for a compressed body that unpacks to far more than the text of requests does."""
    packed, unpacked = request.content.total_compressed_bytes, request.content.total_bytes
    if packed is not None and unpacked > UNPACKED_FREELY + MAX_RATIO * packed:
        message = f"the body unpacks to more than {MAX_RATIO} times its size; send it with less compression, or none"
        raise ApiError(413, message, param="Content-Encoding", code="compression_ratio")


def members(body: bytes) -> Members:
    """Return the body's members by name, with values not yet decoded. Errors: ApiError 400."""
    if not body:
        raise invalid(None, "the body is empty; expected is a JSON object")
    check_json(body)
    try:
        body.decode()  # members that no field reads must be valid, too
        return decode(body, Members)
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except BadJson as error:
        raise invalid(error.path, str(error)) from error
