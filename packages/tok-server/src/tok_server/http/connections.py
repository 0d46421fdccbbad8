"""Connections: bound the resources that slow, idle or too many clients can hold.

A request's head must arrive within `header_timeout`. A client must keep reading its response: within each
`write_timeout` it takes `MIN_READ_BYTES` bytes, or all there are, or the server closes its connection. A connection
without a request is closed after `idle_timeout`. `tok_server.http.body` limits how long bodies may take.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong
from aiohttp.streams import StreamReader

from tok_server.http.context import Context
from tok_server.wire import ApiError, invalid, limited

log = logging.getLogger("tok.server")

MIN_READ_BYTES = 16_384  # bytes that a client must read of a response, or send of an upload, within its timeout
MAX_HEADERS = 128
LINGER_SECONDS = 2.0  # seconds to read on if the response was sent before the request's body had arrived
CHECKS_PER_TIMEOUT = 8  # checks of each connection within the shortest timeout
CONNECTIONS_PER_TURN = 256  # connections checked before other tasks get their turn
RESERVED_FILES = 512  # file descriptors for everything but clients


class Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = (
        "_body",
        "_handling",
        "_head_started_at",
        "_listener",
        "_read_paused",
        "_sent_at",
        "_sent_bytes",
        "_socket",
        "_writer",
    )

    def __init__(self, listener: Listener, server: web.Server) -> None:
        limits = listener.context.settings
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # each request is logged once: by its handler
            keepalive_timeout=limits.idle_timeout,
            lingering_time=LINGER_SECONDS,
            max_line_size=limits.max_header,
            max_field_size=limits.max_header,
            max_headers=MAX_HEADERS,
        )
        self._listener = listener
        self._socket: asyncio.Transport | None = None
        self._handling = self._read_paused = False
        self._head_started_at: float | None = None  # when a head began to arrive that is still incomplete
        self._writer: AbstractStreamWriter | None = None  # of the latest request
        self._body: StreamReader | None = None  # of the latest request
        self._sent_bytes, self._sent_at = 0, 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)  # other loops' transports may not inherit from it
        if self._listener.open(self):
            super().connection_made(transport)
        else:
            # No request has been read yet; a client that sends one early may still receive the reason.
            self._socket.write(_raw_response(self._listener.refuse_connection()))
            self._socket.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.closed(self)
        self._socket = self._writer = self._body = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # A response may precede the end of the body: the rest of the body is not a head.
        rest = self._body is not None and not self._body.is_eof()
        # aiohttp itself passes b"" to resume.
        if data and self._head_started_at is None and not self._handling and not rest:
            self._head_started_at = self._listener.now()
        super().data_received(data)

    def pause_reading(self) -> None:
        self._read_paused = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        # Called for each part of a body that is read. The transport must resume only if reading was paused.
        if self._read_paused:
            self._read_paused = not resume_parser  # else the parser holds back received data
            super().resume_reading(resume_parser)
        elif resume_parser and not self._upgraded:
            self.data_received(b"")  # the parser may hold back received data even without a pause

    def begin(self, writer: AbstractStreamWriter, body: StreamReader) -> None:
        """Mark the start of a request's handling; its head has arrived."""
        self._handling, self._head_started_at, self._writer, self._body = True, None, writer, body
        self._sent_bytes, self._sent_at = 0, self._listener.now()

    def end(self) -> None:
        """Mark the end of the request's handling."""
        self._handling = False

    def check(self, now: float) -> None:
        """Close the connection if its client has exceeded `header_timeout` or `write_timeout`."""
        limits = self._listener.context.settings
        if self._head_started_at is not None and now - self._head_started_at > limits.header_timeout:
            self._head_started_at = None
            self._reject_slow_headers()
        elif self._is_stalled(now, limits.write_timeout):
            self._disconnect_slow_reader()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the response to malformed HTTP, or to a failure outside of a handler, in the shape of all errors."""
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun, so that no error response can be sent")
        failure = _malformed_request(status, exc, message, self._listener.context.settings.max_header)
        self._listener.context.metrics.refuse(failure.limit)
        if status >= 500:
            log.error("a request failed outside of its handler", exc_info=exc)
        response = failure.response()
        response.headers["Server"] = "tok"
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, in the shape of all errors if aiohttp refuses a request before any middleware."""
        if isinstance(resp, web.HTTPExpectationFailed):
            message = f"Expect is {request.headers['Expect'][:80]!r}; allowed: 100-continue"
            resp = ApiError(417, message, param="Expect").response()
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log a failure outside of handlers, unless a client's body cannot be decompressed, which is answered."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def _reject_slow_headers(self) -> None:
        seconds = self._listener.context.settings.header_timeout
        failure = limited("header_timeout", 408, f"the request's headers did not arrive within {seconds:g} seconds")
        self._listener.context.metrics.refuse(failure.limit)
        if self._socket is not None and not self._socket.is_closing():
            self._socket.write(_raw_response(failure))
        self.force_close()

    def _is_stalled(self, now: float, timeout: float) -> bool:
        """Return whether data waits to be sent and the client has taken too little for more than `timeout` seconds."""
        unsent = 0 if self._socket is None else _unsent_bytes(self._socket)
        sent = (0 if self._writer is None else self._writer.output_size) - unsent
        if not unsent or sent >= self._sent_bytes + MIN_READ_BYTES:
            self._sent_bytes, self._sent_at = sent, now
        return now - self._sent_at > timeout and unsent > 0

    def _disconnect_slow_reader(self) -> None:
        log.warning("disconnected a client that did not read its response")
        self._listener.context.metrics.refuse("write_timeout")
        if self._socket is not None:
            self._socket.abort()  # cancels the handler, which aborts the engine's work


class Listener:
    """The open connections of one server."""

    def __init__(self, context: Context, server: web.Server) -> None:
        self.context = context
        self._server = server
        self._open: set[Connection] = set()
        self._loop_time = asyncio.get_running_loop().time
        self._blocked_seconds = 0.0

    def now(self) -> float:
        """Return the loop's time in seconds, minus the time in which the loop was blocked and could not read."""
        return self._loop_time() - self._blocked_seconds

    def __call__(self) -> Connection:
        """Return the protocol of a new connection, for `create_server`."""
        return Connection(self, self._server)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, connection: Connection) -> bool:
        """Register a connection. Return False if `max_connections` are open already."""
        if len(self._open) >= self.context.settings.max_connections:
            return False
        self._open.add(connection)
        return True

    def closed(self, connection: Connection) -> None:
        """Remove a lost connection."""
        self._open.discard(connection)

    def refuse_connection(self) -> ApiError:
        """Count a refused connection and return its error."""
        max_connections = self.context.settings.max_connections
        self.context.metrics.refuse("max_connections")
        return limited("max_connections", 503, f"the maximum of {max_connections} connections is open", retry_after=1)

    async def check_connections(self) -> None:
        """Check every connection periodically."""
        limits = self.context.settings
        pause = min(1.0, min(limits.header_timeout, limits.write_timeout) / CHECKS_PER_TIMEOUT)
        while True:
            began = self._loop_time()
            await asyncio.sleep(pause)
            self._blocked_seconds += max(0.0, self._loop_time() - began - pause)
            for number, connection in enumerate(list(self._open)):
                connection.check(self.now())
                if number % CONNECTIONS_PER_TURN == CONNECTIONS_PER_TURN - 1:
                    await asyncio.sleep(0)


@asynccontextmanager
async def accept_connections(
    runner: web.AppRunner, context: Context, port: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[Listener]:
    """Accept connections at `port` while the context lasts. The runner's cleanup ends open ones."""
    assert runner.server is not None
    listener = Listener(context, runner.server)
    context.metrics.connections.set_function(listener.__len__)
    loop = asyncio.get_running_loop()
    timeout = context.settings.header_timeout if tls else None
    server = await loop.create_server(listener, sock=port, ssl=tls, backlog=1024, ssl_handshake_timeout=timeout)
    check_task = asyncio.create_task(listener.check_connections())
    try:
        yield listener
    finally:
        server.close()
        check_task.cancel()
        with suppress(asyncio.CancelledError):
            await check_task


def raise_file_limit(connections: int) -> None:
    """Raise the process's limit of open files to what `connections` need; log a warning if the system forbids it."""
    needed = connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning("the limit of %d open files is too low for --max-connections %d", hard, connections)


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes that the system has not taken yet.

    With TLS, asyncio's own count has only unencrypted bytes; the encrypted ones are in the transport below.
    """
    below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return transport.get_write_buffer_size() + (0 if below is None else int(below.get_write_buffer_size()))


def _malformed_request(status: int, exc: BaseException | None, message: str | None, max_header: int) -> ApiError:
    if isinstance(exc, LineTooLong):
        return limited("max_header", 431, f"a header, or the request line, has more than {max_header} bytes")
    if isinstance(exc, ContentEncodingError):  # one that aiohttp knows, but lacks the package for
        reason = "Content-Encoding is not supported; allowed: identity, gzip, deflate"
        return ApiError(415, reason, param="Content-Encoding", code="unsupported_media_type")
    if status >= 500:
        return ApiError(status, "internal error; see the server's log", kind="server_error", code="internal_error")
    return invalid(None, f"the request is not valid HTTP: {(message or 'bad request').splitlines()[0][:200]}")


def _raw_response(error: ApiError) -> bytes:
    """Return a whole HTTP response, for a connection that has no request."""
    body = error.body()
    named = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **error.headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {error.status} \r\n{head}\r\n".encode() + body
