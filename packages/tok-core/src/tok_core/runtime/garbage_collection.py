"""Keep Python's garbage collector from repeatedly scanning objects that live as long as the process."""

from __future__ import annotations

import gc

ALLOCATIONS, COLLECTIONS = 5_000, 20  # for gc.set_threshold: net allocations; collections of the younger generation


def freeze_gc_heap() -> None:
    """Freeze all current objects and make collections rarer. Call this once everything is loaded.

    Objects that exist by then live as long as the process, so scanning them is wasted time. Reference counting alone
    frees the objects of a request, so collections may be rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, COLLECTIONS, COLLECTIONS)
