"""Measure how long an event loop is blocked, by its own work or by the interpreter."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tok_server.http.event_loop import SWITCH_INTERVAL_SECONDS

T = TypeVar("T")

TICK = 0.002  # seconds between measurements
TRIES = 4


class LoopLag:
    """Measures the longest delay of a loop that runs in another thread.

    A delay counts up to the CPU time of this process meanwhile, so that other programs do not add to it.
    """

    def __init__(self) -> None:
        self.max_sequence_tokens = 0.0

    async def look(self) -> None:
        """Measure until cancelled."""
        while True:
            began, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK)
            late = time.monotonic() - began - TICK
            self.max_sequence_tokens = max(self.max_sequence_tokens, min(late, time.process_time() - cpu))


@contextmanager
def server_pauses() -> Iterator[None]:
    """Configure garbage collection and thread switches as a server does (`tok_server.http.event_loop`)."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def least_lag(loop: asyncio.AbstractEventLoop, action: Callable[[], T], enough: float) -> tuple[float, T]:
    """Return the least lag of `loop` in up to TRIES runs of `action`, and the last result; stop below `enough` seconds.

    Code that blocks the loop blocks it every time; other programs on the machine do not.
    """
    least = math.inf
    for _ in range(TRIES):
        with watched(loop) as lag:
            result = action()
        least = min(least, lag.max_sequence_tokens)
        if least < enough:
            break
    return least, result


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[LoopLag]:
    """Measure the delays of `loop` while the context lasts."""
    lag = LoopLag()
    looking = asyncio.run_coroutine_threadsafe(lag.look(), loop)
    try:
        yield lag
    finally:
        looking.cancel()
