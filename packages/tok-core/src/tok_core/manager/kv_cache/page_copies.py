"""Queue copies of KV pages that the worker makes at the start of a step, in the order of earlier steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tok_core.manager.kv_cache.page_allocator import PageAllocator
from tok_core.messages import EMPTY, Int32, Int64


class _Copy(NamedTuple):
    """From `source` to `target`, int32 [n] each; `use` is how often each target had been released by then."""

    source: Int32
    target: Int32
    use: Int64


class PageCopies:
    """Copies to come. One whose target has been released meanwhile is dropped, whoever has the page now: so no page
    is a target twice, and none is overwritten that its new owner has filled. A source may have been released: the
    copies come before whatever the step writes. Within a step a page may be one's source and another's target.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._now: list[_Copy] = []
        self._later: list[_Copy] = []

    def add(self, source: Int32, target: Int32) -> None:
        """To be made at the start of the step that is being scheduled."""
        self._now.append(_Copy(source, target, self._allocator.times_released[target]))

    def add_later(self, source: Int32, target: Int32) -> None:
        """To be made at the start of the step after the one that is being scheduled, which may write the sources."""
        self._later.append(_Copy(source, target, self._allocator.times_released[target]))

    def take(self) -> tuple[Int32, Int32]:
        """The step is sent: sources and targets, int32 [n] each, of the copies at its start."""
        now, self._now, self._later = self._now, self._later, []
        if not now:
            return EMPTY, EMPTY
        source, target, use = (np.concatenate(part) for part in zip(*now, strict=True))
        live = self._allocator.times_released[target] == use
        return source[live], target[live]
