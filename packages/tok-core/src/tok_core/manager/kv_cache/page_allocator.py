"""PageAllocator: the free pages of the KV cache as one stack of ids."""

from __future__ import annotations

import numpy as np

from tok_core.messages import Int32


class OutOfPages(RuntimeError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Hands out page ids 0 … num_pages − 1 and takes them back; those given back last are reused first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = num_pages
        self._stack: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # its first `free` entries count
        self.times_released = np.zeros(num_pages, np.int64)  # tells a page's present use from earlier ones
        self._in_use = np.zeros(num_pages, np.bool_)
        self._position = np.zeros(num_pages, np.int32)  # scratch of `_assert_in_use`

    def allocate(self, count: int) -> Int32:
        """`count` pages, int32 [count]. Raises OutOfPages, with nothing changed, where fewer are free."""
        if count > self.free:
            raise OutOfPages(f"{count} pages wanted, {self.free} of {self.num_pages} free")
        pages = self._stack[self.free - count : self.free][::-1].copy()
        self._in_use[pages] = True
        self.free -= count
        return pages

    def release(self, pages: Int32) -> None:
        """Takes back `pages`, int32 [n]. A page that is not in use, or twice among them, is an AssertionError."""
        if not len(pages):
            return
        self._assert_in_use(pages)
        self._in_use[pages] = False
        self.times_released[pages] += 1
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)

    def _assert_in_use(self, pages: Int32) -> None:
        known = pages.view(np.uint32) < self.num_pages  # what is negative is large
        assert known.all(), f"pages {pages[~known]} released, ids end at {self.num_pages - 1}"
        used = self._in_use[pages]
        assert used.all(), f"pages {pages[~used]} released, which are free"
        # A page that is there twice keeps the position that was written last, so the other one differs.
        positions = np.arange(len(pages), dtype=np.int32)
        self._position[pages] = positions
        once = self._position[pages] == positions
        assert once.all(), f"pages {pages[~once]} released twice at once"
