"""Allocate pages of the KV cache from a stack of free page ids."""

from __future__ import annotations

import numpy as np

from tok_core.messages import Int32


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
            raise OutOfPages(f"{count} pages wanted, {self.free} of {self.num_pages} free")
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
