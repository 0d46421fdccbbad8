"""The page allocator behaves like a set of free pages."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core.manager.kv_cache.page_allocator import OutOfPages, PageAllocator

NUM_PAGES = 12


@given(st.lists(st.tuples(st.booleans(), st.integers(0, NUM_PAGES + 2), st.randoms()), max_size=60))
def test_allocated_page_is_not_allocated_again_until_released(
    steps: list[tuple[bool, int, Random]],
) -> None:
    allocator, in_use = PageAllocator(NUM_PAGES), set[int]()
    for allocating, count, random in steps:
        if not allocating:
            back = random.sample(sorted(in_use), min(count, len(in_use)))
            allocator.release(np.array(back, np.int32))
            in_use -= set(back)
        elif count > NUM_PAGES - len(in_use):
            with pytest.raises(OutOfPages, match=f"{count} pages requested"):
                allocator.allocate(count)
        else:
            pages = allocator.allocate(count)
            assert pages.dtype == np.int32
            fresh = set(pages.tolist())
            assert len(fresh) == count
            assert fresh <= set(range(NUM_PAGES)) - in_use
            in_use |= fresh
        assert allocator.free == NUM_PAGES - len(in_use)
    assert set(allocator.allocate(allocator.free).tolist()) == set(range(NUM_PAGES)) - in_use


def test_allocated_page_ids_do_not_change_with_later_allocations() -> None:
    allocator = PageAllocator(8)
    kept = allocator.allocate(4)
    before = kept.tolist()
    allocator.release(allocator.allocate(4)[::-1])
    allocator.allocate(2)
    assert kept.tolist() == before


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0, 3], "which are free"),
        ([1, 1], "released twice at once"),
        ([2, 8], "ids end at 7"),
        ([-1], "ids end at 7"),
    ],
)
def test_invalid_page_release_raises_and_changes_nothing(pages: list[int], message: str) -> None:
    allocator = PageAllocator(8)
    assert allocator.allocate(3).tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match=message):
        allocator.release(np.array(pages, np.int32))
    assert allocator.free == 5
    allocator.release(np.array([0, 1, 2], np.int32))
    assert sorted(allocator.allocate(8).tolist()) == list(range(8))


def test_double_page_release_raises() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="which are free"):
        allocator.release(pages)
