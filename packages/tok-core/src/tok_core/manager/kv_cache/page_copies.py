"""Queue copies of KV pages, which the worker makes at the start of a step, after all earlier steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tok_core.manager.kv_cache.page_allocator import PageAllocator
from tok_core.messages import EMPTY, Int32, Int64


class _Copy(NamedTuple):
    """Copies from `source` to `target`, int32 [n] each; `use`: how often each target had been released when queued."""

    source: Int32
    target: Int32
    use: Int64


class PageCopies:
    """Queue of page copies.

    A copy is dropped if its target has been released since, whoever owns the page now. So no page is a target twice,
    and no page is overwritten that its new owner has filled. A source may have been released, because copies run before
    anything that the step writes. Within a step, a page may be the source of one copy and the target of another.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._now: list[_Copy] = []
        self._later: list[_Copy] = []

    def add(self, source: Int32, target: Int32) -> None:
        """Queue copies for the start of the step that is being scheduled."""
        self._now.append(_Copy(source, target, self._allocator.times_released[target]))

    def add_later(self, source: Int32, target: Int32) -> None:
        """Queue copies for the start of the next step; the step that is being scheduled may still write the sources."""
        self._later.append(_Copy(source, target, self._allocator.times_released[target]))

    def take(self) -> tuple[Int32, Int32]:
        """Return the sources and targets, int32 [n] each, of the copies at the start of the step that is being sent."""
        now, self._now, self._later = self._now, self._later, []
        if not now:
            return EMPTY, EMPTY
        source, target, use = (np.concatenate(part) for part in zip(*now, strict=True))
        live = self._allocator.times_released[target] == use
        return source[live], target[live]
