"""The server's event loop: uvloop's if it is installed, since it takes less CPU time per request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[object, object, T], *, tls: bool = False) -> T:
    """Run `coroutine` as `asyncio.run` does.

    tls  connections are encrypted, so use asyncio's own loop: only it reports the bytes that wait below the encryption
         (`tok_server.http.connections`)
    """
    with asyncio.Runner(loop_factory=asyncio.new_event_loop if tls else new_event_loop) as runner:
        return runner.run(coroutine)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop if it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:  # not available for Windows, nor for every interpreter
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
