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
MAX_COMPRESSION_RATIO = 100  # unpacked bytes per packed byte; JSON lines have 5 to 40, DEFLATE reaches 1,032
RATIO_FREE_BYTES = 1 << 20  # bytes that may be unpacked at any ratio
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})


async def read_body(request: web.Request, context: Context) -> bytes:
    """Return the body's bytes. Errors: ApiError 400 (type, truncated), 408 (slow), 413 (large), 503 (too many held)."""
    content_type = request.headers.get("Content-Type", JSON)
    if content_type != JSON and (kind := request.content_type) != JSON:
        raise invalid("Content-Type", f"Content-Type is {kind!r}; allowed: {JSON}")
    try:
        if request.content.is_eof():  # the body arrived together with the head
            return _read_buffered(request, context)
        async with asyncio.timeout(context.settings.body_timeout):
            return await _read_stream(request, context)
    except TimeoutError as error:
        message = f"the body did not arrive within {context.settings.body_timeout:g} seconds"
        raise limited("body_timeout", 408, message, code="request_timeout") from error
    except web.RequestPayloadError as error:
        raise invalid(None, f"the body cannot be read: {error}") from error


def _read_buffered(request: web.Request, context: Context) -> bytes:
    body = request.content.read_nowait()
    if len(body) > context.settings.max_body:
        raise too_large(context.settings.max_body)
    reserve_body_bytes(request, context, len(body))
    return body


async def _read_stream(request: web.Request, context: Context) -> bytes:
    max_bytes = context.settings.max_body
    if (request.content_length or 0) > max_bytes:
        raise too_large(max_bytes)
    parts = []
    size = 0
    async for part in request.content.iter_any():
        check_compression_ratio(request)
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        reserve_body_bytes(request, context, len(part))
        parts.append(part)
    return b"".join(parts)


def reserve_body_bytes(request: web.Request, context: Context, size: int) -> None:
    """Count `size` more bytes of the body as held until the request ends. Errors: ApiError 503 beyond `max_bodies`."""
    max_bytes = context.settings.max_bodies
    if context.body_bytes + size > max_bytes:
        raise limited(
            "max_bodies", 503, f"the bodies of open requests would exceed {max_bytes} bytes together", retry_after=1
        )
    context.body_bytes += size
    request[COUNTS].body_bytes += size


def check_encoding(request: web.Request) -> None:
    """Raise ApiError (415) for a body in an unsupported encoding. Size limits apply to the unpacked body."""
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() not in ENCODINGS:
        message = f"Content-Encoding is {encoding[:80]!r}; allowed: identity, gzip, deflate"
        raise ApiError(415, message, param="Content-Encoding", code="unsupported_media_type")


def check_compression_ratio(request: web.Request) -> None:
    """Raise ApiError (413) for a compressed body that unpacks to far more than the text of requests does."""
    packed, unpacked = request.content.total_compressed_bytes, request.content.total_bytes
    if packed is not None and unpacked > RATIO_FREE_BYTES + MAX_COMPRESSION_RATIO * packed:
        message = f"the body decompresses to more than {MAX_COMPRESSION_RATIO} times its size; compress it less"
        raise ApiError(413, message, param="Content-Encoding", code="compression_ratio")


def decode_members(body: bytes) -> Members:
    """Return the body's members by name, with values not yet decoded. Errors: ApiError 400."""
    if not body:
        raise invalid(None, "the body is empty; allowed: a JSON object")
    check_json(body)
    try:
        body.decode()  # members that no field reads must be valid, too
        return decode(body, Members)
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except BadJson as error:
        raise invalid(error.path, str(error)) from error
