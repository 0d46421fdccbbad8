"""A request's body: read within limits of size and time, and split into its members."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from tok_server.http.context import Context
from tok_server.observability import COUNTS
from tok_server.wire import ApiError, BadJson, check_json, decode, invalid, limited, too_large

Members = dict[str, msgspec.Raw]

JSON = "application/json"
MAX_RATIO = 100  # unpacked bytes for each packed one; JSON lines have 5 to 40, DEFLATE can make it 1,032
UNPACKED_FREELY = 1 << 20  # bytes, of any ratio
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})


async def read_body(request: web.Request, context: Context) -> bytes:
    """The body's bytes. Errors: ApiError 400 (content type, cut short), 408 (slow), 413 (large), 503 (too many)."""
    given = request.headers.get("Content-Type", JSON)
    if given != JSON and (kind := request.content_type) != JSON:
        raise invalid("Content-Type", f"Content-Type is {kind!r}; allowed: {JSON}")
    try:
        if request.content.is_eof():  # it has come together with the head
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
    """So many bytes more of the body are held until the request ends. Errors: ApiError 503 where all are too many."""
    most = context.settings.max_bodies
    if context.held_bytes + size > most:
        raise limited("max_bodies", 503, f"the bodies of open requests have {most} bytes already", retry_after=1)
    context.held_bytes += size
    request[COUNTS].held_bytes += size


def check_encoding(request: web.Request) -> None:
    """Raises ApiError (415) for a body packed in a way that nobody unpacks. Others are measured unpacked."""
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() not in ENCODINGS:
        message = f"Content-Encoding is {encoding[:80]!r}; allowed: identity, gzip, deflate"
        raise ApiError(415, message, param="Content-Encoding", code="unsupported_media_type")


def check_ratio(request: web.Request) -> None:
    """Raise ApiError (413) for a compressed body that unpacks to far more than any text of requests does."""
    packed, unpacked = request.content.total_compressed_bytes, request.content.total_bytes
    if packed is not None and unpacked > UNPACKED_FREELY + MAX_RATIO * packed:
        message = f"the body unpacks to more than {MAX_RATIO} times its size; send it with less compression, or none"
        raise ApiError(413, message, param="Content-Encoding", code="compression_ratio")


def members(body: bytes) -> Members:
    """The body's members by name, their values not yet decoded. Errors: ApiError 400."""
    if not body:
        raise invalid(None, "the body is empty; expected is a JSON object")
    check_json(body)
    try:
        body.decode()  # also what no field reads is to be valid
        return decode(body, Members)
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except BadJson as error:
        raise invalid(error.path, str(error)) from error
