"""Run the server: listen, start the engine, announce it, answer requests until a signal, drain, close."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable

from aiohttp import web

from tok_core import AsyncEngine, EngineConfig, InvalidField, TokError
from tok_server.app import make_app
from tok_server.http import CONTEXT, Context, accept_connections, raise_file_limit, shorten_pauses
from tok_server.settings import Settings

log = logging.getLogger("tok.server")

REPEATED_SIGNAL_SECONDS = (
    0.5  # seconds in which a second signal is ignored: launchers forward signals that the server has got already
)
DRAIN_POLL_SECONDS = 0.05  # seconds between checks of the open requests while draining


class ServeError(Exception):
    """The server cannot start; the message says why in one line."""


async def serve(config: EngineConfig, settings: Settings, announce: Callable[[AsyncEngine, int], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once.

    announce  called with the engine and the port once requests are accepted
    Errors: ServeError (address in use), TokError (the engine cannot start).
    """
    tls = None if settings.tls_cert is None else server_context(settings.tls_cert, settings.tls_key)
    raise_file_limit(settings.max_connections)
    listener = listen(settings.host, settings.port)
    engine = AsyncEngine(config)
    app = make_app(engine, settings, ready=False)
    stopping = _stop_on_signals()
    # /health answers "starting" from here on, so that clients waiting for the model can see it load.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=5.0)
    await runner.setup()
    try:
        async with accept_connections(runner, app[CONTEXT], listener, tls):
            await _run(engine, app[CONTEXT], stopping, lambda: announce(engine, listener.getsockname()[1]))
            await engine.close()  # fails requests that are still open
    finally:
        await engine.close()
        await runner.cleanup()


async def _run(engine: AsyncEngine, context: Context, stopping: asyncio.Event, announce: Callable[[], None]) -> None:
    if not await _start_engine(engine, stopping):
        return
    shorten_pauses()
    context.ready = True
    announce()
    await stopping.wait()
    context.draining = True
    log.info("stopping; open requests: %d", context.open_requests)
    await _wait_until_drained(context)


async def _start_engine(engine: AsyncEngine, stopping: asyncio.Event) -> bool:
    """Start the engine. Return whether it is ready; False if a signal comes first. Errors: TokError."""
    start = asyncio.create_task(engine.start())
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if start.done():
        start.result()
        return True
    start.cancel()
    try:
        await start
    except (asyncio.CancelledError, TokError):
        log.info("stopped while starting")
    return False


async def _wait_until_drained(context: Context) -> None:
    """Wait until no work is open, or `drain_timeout` has passed."""
    deadline = time.monotonic() + context.settings.drain_timeout
    while _has_open_work(context) and time.monotonic() < deadline:
        await asyncio.sleep(DRAIN_POLL_SECONDS)


def _has_open_work(context: Context) -> bool:
    """Return whether requests are open or batch lines have started, which the engine can finish.

    A paused or sleeping engine finishes none. Batch lines do not count while the engine has failed.
    """
    if context.engine.is_paused or context.engine.is_sleeping:
        return False
    if context.open_requests:
        return True
    return context.background_requests() > 0 and context.engine.health().state != "failed"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Errors: ServeError.

    `serve` calls this before the model loads: finding a port in use should not take minutes.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"cannot listen on host {host!r}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        hint = "; choose another with --port (0: any free one)" if error.errno == errno.EADDRINUSE else ""
        raise ServeError(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from error
    return listener


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    first = 0.0

    def stop(number: signal.Signals) -> None:
        nonlocal first
        if not stopping.is_set():
            first = loop.time()
            stopping.set()
        elif loop.time() - first > REPEATED_SIGNAL_SECONDS:
            os._exit(128 + number)  # the engine's processes end with their parent

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return stopping


def server_context(cert: str, key: str | None) -> ssl.SSLContext:
    """Return a context of TLS 1.2 or later with this certificate. Errors: InvalidField naming the unusable file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for field, name in (("tls_cert", cert), ("tls_key", key)):
        if name is not None:
            _check_readable(field, name)
    try:
        # An empty password keeps OpenSSL from prompting on the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise InvalidField(
            "tls_cert", cert, f"a certificate and its key without password, as PEM ({reason})"
        ) from error
    return context


def _check_readable(field: str, name: str) -> None:
    try:
        with open(name, "rb"):
            pass
    except OSError as error:
        raise InvalidField(field, name, f"a readable file ({error.strerror})") from error
