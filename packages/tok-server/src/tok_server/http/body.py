"""Read a request's body within limits of size, time and structure, and split it into its members.

The JSON decoder holds the GIL until a whole body is decoded. Each string, object and array costs it far more than the
three bytes that one takes. `check_json` therefore scans a body's bytes first. Within its limits, a body blocks the
event loop for less than 100 ms.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from aiohttp import web

from tok_server.http.context import Context
from tok_server.observability import COUNTS
from tok_server.wire import JSON, ApiError, decode, invalid, limited, too_large

Members = dict[str, msgspec.Raw]

MAX_COMPRESSION_RATIO = 100  # unpacked bytes per packed byte; JSON lines have 5 to 40, DEFLATE reaches 1,032
RATIO_FREE_BYTES = 1 << 20  # bytes that may be unpacked at any ratio
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})

MAX_MEMBERS = 70_000  # strings (keys too), objects and arrays: enough for 65,536 text prompts and some more
MAX_VALUES = 1 << 20  # values separated by commas: enough for the token ids of the longest prompts
MAX_NESTING = 128  # levels of nested arrays and objects
PIECE_BYTES = 1 << 18  # bytes scanned together: other threads run in between

QUOTE, BACKSLASH = b'"\\'
# Change of the nesting depth by each byte outside of strings; `COMMA` marks a comma, which does not change it.
COMMA = 2
DEPTH_CHANGE = np.zeros(256, np.int8)
DEPTH_CHANGE[list(b"[{")], DEPTH_CHANGE[list(b"]}")], DEPTH_CHANGE[ord(",")] = 1, -1, COMMA


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
        reason = str(error).splitlines()[-1].strip()  # the first line of some is "400, message:"
        raise invalid(None, f"the body cannot be read: {reason}") from error


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


def check_json(body: bytes) -> None:
    """Raise ApiError (400) for a body with too many members, too many values or too deep nesting."""
    if len(body) > 2 * MAX_MEMBERS or body.count(b"{") + body.count(b"[") > MAX_NESTING:
        _Scan().run(body)


class _Scan:
    """Counter of strings, containers, commas and nesting, piece by piece. For valid JSON, no count is too low."""

    def __init__(self) -> None:
        self._strings = self._containers = self._commas = self._depth = 0
        self._in_string = 0
        self._backslashes = 0  # trailing ones of the pieces so far

    def run(self, body: bytes) -> None:
        """Scan `body`. Errors: ApiError (400)."""
        for start in range(0, len(body), PIECE_BYTES):
            self._scan_piece(np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - start), start))

    def _scan_piece(self, piece: np.ndarray) -> None:
        quotes = self._unescaped_quotes(piece)
        marks = DEPTH_CHANGE[piece].nonzero()[0]
        outside = (np.searchsorted(quotes, marks) + self._in_string) % 2 == 0
        change = DEPTH_CHANGE[piece[marks[outside]]]
        self._strings += len(quotes)  # counts quotes: two per string
        self._in_string = (self._in_string + len(quotes)) % 2
        self._containers += int((change == 1).sum())
        self._commas += int((change == COMMA).sum())
        depth = self._depth + np.where(change == COMMA, 0, change).cumsum(dtype=np.int64)
        if len(depth):
            self._depth = int(depth[-1])
        self._check(int(depth.max(initial=0)))

    def _unescaped_quotes(self, piece: np.ndarray) -> np.ndarray:
        """Return the positions of the quotes that an even number of backslashes precedes."""
        plain = (piece != BACKSLASH).nonzero()[0]
        quotes: np.ndarray = (piece == QUOTE).nonzero()[0]
        if len(plain) < len(piece) or self._backslashes:
            index = np.searchsorted(plain, quotes)
            before = np.where(index > 0, plain[index - 1], -1 - self._backslashes)
            quotes = quotes[(quotes - before) % 2 == 1]
        self._backslashes = len(piece) - 1 - int(plain[-1]) if len(plain) else self._backslashes + len(piece)
        return quotes

    def _check(self, depth: int) -> None:
        if depth > MAX_NESTING:
            raise _too_much(f"more than {MAX_NESTING} arrays and objects within each other", "nested_too_deeply")
        members = self._strings // 2 + self._containers
        if members > MAX_MEMBERS:
            raise _too_much(
                f"more than {MAX_MEMBERS} strings, objects and arrays (keys are strings, too)", "too_many_members"
            )
        if self._commas >= MAX_VALUES:
            raise _too_much(f"more than {MAX_VALUES} values", "too_many_members")


def _too_much(what: str, code: str) -> ApiError:
    return invalid(None, f"the body has {what}", code)
