"""Run the server's event loop, and shorten the pauses that hold up all of its requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import TypeVar

from tok_core.runtime import freeze_gc_heap

T = TypeVar("T")
SWITCH_INTERVAL_SECONDS = 0.001  # seconds for which a thread may hold the GIL while others want it


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


def shorten_pauses() -> None:
    """Collect garbage less often (`tok_core.runtime.garbage_collection`); let threads yield to the event loop sooner.

    Call this once everything is loaded.
    """
    freeze_gc_heap()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
