"""Run a real server on a real port: engine, application and event loop in a thread of the test process."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from support.patience import PATIENCE
from support.patience import wait_until as wait_until
from tok_core import AsyncEngine, EngineConfig
from tok_server import Settings, make_app
from tok_server.http.connections import accept_connections
from tok_server.http.context import CONTEXT, Context
from tok_server.serve import listen, server_context

NAME = "tiny"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (names in lower case) and body of a response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        """Return the body, which must be a JSON object."""
        found = json.loads(self.body, parse_constant=_refuse)
        assert isinstance(found, dict)
        return found

    def error(self) -> dict[str, object]:
        """Return the error object, which must have all four members."""
        found = self.json()["error"]
        assert isinstance(found, dict)
        assert found.keys() == {"message", "type", "param", "code"}
        return found

    def events(self) -> list[str]:
        """Return the data of the server-sent events."""
        assert self.headers["content-type"].startswith("text/event-stream")
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") for block in blocks)
        return [block.removeprefix("data: ") for block in blocks]

    def chunks(self) -> list[dict[str, object]]:
        """Return the events of a stream, which must end with [DONE]."""
        *events, done = self.events()
        assert done == "[DONE]"
        return [json.loads(event, parse_constant=_refuse) for event in events]


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    port: int
    engine: AsyncEngine
    context: Context
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self.port}/v1"

    def call(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
        """Send one request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            given = {"Content-Type": "application/json"} | (headers or {})
            connection.request(method, path, data, given)
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    def complete(self, **fields: object) -> Answer:
        """Send POST /v1/completions."""
        return self.call("POST", "/v1/completions", {"model": NAME, **fields})

    def chat(self, **fields: object) -> Answer:
        """Send POST /v1/chat/completions."""
        return self.call("POST", "/v1/chat/completions", {"model": NAME, **fields})


@contextmanager
def serving(
    model: Path,
    *,
    name: str = NAME,
    api_key: str | None = None,
    max_body: int = 1 << 20,
    engine_options: dict[str, Any] | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[Server]:
    """Serve `model` under `name` on the CPU while the context lasts, with `options` of `Settings`.

    send_buffer  bytes that the kernel buffers for a client that does not read; None: megabytes
    """
    sizes: dict[str, Any] = {"kv_cache_tokens": 16_384, "max_running": 64} | (engine_options or {})
    config = EngineConfig(model=str(model), device="cpu", **sizes)
    keys = () if api_key is None else (api_key,)
    settings = Settings(**{"model_name": name, "api_keys": keys, "max_body": max_body, **options})
    tls = None if settings.tls_cert is None else server_context(settings.tls_cert, settings.tls_key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engine = AsyncEngine(config, in_process=True)
    runner = web.AppRunner(make_app(engine, settings), handler_cancellation=True)
    closing = AsyncExitStack()

    async def start() -> int:
        await engine.start()
        await runner.setup()
        listener = listen("127.0.0.1", 0)
        if send_buffer is not None:  # connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        await closing.enter_async_context(accept_connections(runner, runner.app[CONTEXT], listener, tls))
        return int(listener.getsockname()[1])

    async def stop() -> None:
        await closing.aclose()
        await runner.cleanup()
        await engine.close()

    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE)
        yield Server(port, engine, runner.app[CONTEXT], loop)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def free_port() -> int:
    """Return a port for another process to listen on later, below the range of ephemeral ports."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in range(lowest - 1 - os.getpid() % (lowest // 2), 1024, -1):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")
