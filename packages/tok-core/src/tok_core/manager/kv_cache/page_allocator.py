"""Allocate pages of the KV cache, and queue copies between them, which the worker makes at the start of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tok_core.messages import EMPTY, Int32, Int64


class OutOfPages(RuntimeError):
    """Error: more pages were requested than are free."""


class PageAllocator:
    """Allocator of page ids 0 … num_pages − 1; the pages released last are reused first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = num_pages
        self._stack: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the first `free` entries are valid
        self.times_released = np.zeros(num_pages, np.int64)  # distinguishes a page's present use from earlier ones
        self._in_use = np.zeros(num_pages, np.bool_)
        self._position = np.zeros(num_pages, np.int32)  # scratch of `_assert_in_use`

    def allocate(self, count: int) -> Int32:
        """Return `count` pages, int32 [count]. Raises OutOfPages, with nothing changed, if fewer are free."""
        if count > self.free:
            raise OutOfPages(f"{count} pages requested, {self.free} of {self.num_pages} are free")
        pages = self._stack[self.free - count : self.free][::-1].copy()
        self._in_use[pages] = True
        self.free -= count
        return pages

    def release(self, pages: Int32) -> None:
        """Take back `pages`, int32 [n]. Raises AssertionError if a page is not in use or occurs twice among them."""
        if not len(pages):
            return
        self._assert_in_use(pages)
        self._in_use[pages] = False
        self.times_released[pages] += 1
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)

    def _assert_in_use(self, pages: Int32) -> None:
        known = pages.view(np.uint32) < self.num_pages  # as uint32, negative ids are large
        assert known.all(), f"pages {pages[~known]} released, ids end at {self.num_pages - 1}"
        used = self._in_use[pages]
        assert used.all(), f"pages {pages[~used]} released, which are free"
        # For a page that occurs twice, the later position overwrites the earlier one, which then differs.
        positions = np.arange(len(pages), dtype=np.int32)
        self._position[pages] = positions
        once = self._position[pages] == positions
        assert once.all(), f"pages {pages[~once]} released twice at once"


class _Copy(NamedTuple):
    """Copies from `source` to `target`, int32 [n] each; `use`: how often each target had been released when queued."""

    source: Int32
    target: Int32
    use: Int64


class PageCopies:
    """Queue of page copies, which the worker makes at the start of a step, after all earlier steps.

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
