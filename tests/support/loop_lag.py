"""How late an event loop is: the longest time for which something kept it, or the interpreter, from going on."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tok_server.http.pauses import SWITCH

TICK = 0.002  # seconds between looks


class LoopLag:
    """Looks at a loop that runs in another thread.

    A delay counts for as long as this process had the CPU meanwhile: what other programs take of it is not the loop's.
    """

    def __init__(self) -> None:
        self.longest = 0.0

    async def look(self) -> None:
        """Look until cancelled."""
        while True:
            began, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK)
            late = time.monotonic() - began - TICK
            self.longest = max(self.longest, min(late, time.process_time() - cpu))


@contextmanager
def server_pauses() -> Iterator[None]:
    """Treat garbage and threads as in a server (`tok_server.http.pauses`) meanwhile."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[LoopLag]:
    """Watch `loop` meanwhile."""
    lag = LoopLag()
    looking = asyncio.run_coroutine_threadsafe(lag.look(), loop)
    try:
        yield lag
    finally:
        looking.cancel()
