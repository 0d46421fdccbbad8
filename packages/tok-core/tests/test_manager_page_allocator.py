"""The page allocator against a set of free pages."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core.manager.kv_cache.page_allocator import OutOfPages, PageAllocator

NUM_PAGES = 12


@given(st.lists(st.tuples(st.booleans(), st.integers(0, NUM_PAGES + 2), st.randoms()), max_size=60))
def test_every_page_is_either_free_or_in_use_once(
    steps: list[tuple[bool, int, Random]],
) -> None:
    allocator, in_use = PageAllocator(NUM_PAGES), set[int]()
    for allocating, count, random in steps:
        if not allocating:
            back = random.sample(sorted(in_use), min(count, len(in_use)))
            allocator.release(np.array(back, np.int32))
            in_use -= set(back)
        elif count > NUM_PAGES - len(in_use):
            with pytest.raises(OutOfPages, match=f"{count} pages wanted"):
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


def test_allocated_pages_do_not_change_when_others_come_and_go() -> None:
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
def test_a_wrong_release_is_an_assertion_error_and_changes_nothing(pages: list[int], message: str) -> None:
    allocator = PageAllocator(8)
    assert allocator.allocate(3).tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match=message):
        allocator.release(np.array(pages, np.int32))
    assert allocator.free == 5
    allocator.release(np.array([0, 1, 2], np.int32))
    assert sorted(allocator.allocate(8).tolist()) == list(range(8))


def test_the_second_release_of_the_same_pages_is_an_assertion_error() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="which are free"):
        allocator.release(pages)
