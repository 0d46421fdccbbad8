"""Keep Python's garbage collector from repeatedly scanning objects that live as long as the process."""

from __future__ import annotations

import gc

ALLOCATIONS, GENERATIONS = 5_000, 20


def settle() -> None:
    """To be called once all is loaded.

    What is there then stays until the end: the garbage collector need not look at it. What a request leaves behind is
    freed without a collector, so that it may come less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, GENERATIONS, GENERATIONS)
