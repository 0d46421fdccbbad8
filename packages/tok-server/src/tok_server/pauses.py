"""Pauses: what holds up every request of a server at once, and is not of its own making, is kept short."""

from __future__ import annotations

import gc
import sys

SWITCH = 0.001  # seconds for which a thread may keep the interpreter from others that want it
ALLOCATIONS, GENERATIONS = 5_000, 20


def keep_short() -> None:
    """To be called once all is loaded.

    What is there then stays until the end: the garbage collector need not look at it. What a request leaves behind is
    freed without a collector, so that it may come less often. Threads hand the interpreter to the event loop sooner
    than by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, GENERATIONS, GENERATIONS)
    sys.setswitchinterval(SWITCH)
