"""The event loop that a server runs on: uvloop's where it is installed, which takes less of the CPU a request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(work: Coroutine[object, object, T], *, tls: bool = False) -> T:
    """As `asyncio.run`.

    tls  connections are encrypted: asyncio's own loop then, the only one that tells what waits below the encryption
         (`connections`)
    """
    with asyncio.Runner(loop_factory=asyncio.new_event_loop if tls else new_event_loop) as runner:
        return runner.run(work)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest that there is."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows, nor for every interpreter
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
