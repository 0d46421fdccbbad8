"""Page copies write each target once, and only for its present owner."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tok_core.manager.kv_cache.page_allocator import PageAllocator, PageCopies


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def taken(copies: PageCopies) -> list[tuple[int, int]]:
    source, target = copies.take()
    assert source.dtype == target.dtype == np.int32
    return list(zip(source.tolist(), target.tolist(), strict=True))


def test_copies_from_pages_written_by_a_step_go_into_the_next_step() -> None:
    allocator = PageAllocator(8)
    copies, own = PageCopies(allocator), allocator.allocate(4)
    copies.add(pages(7), own[:1])
    copies.add_later(pages(5, 5), own[1:3])
    assert taken(copies) == [(7, own[0])]
    copies.add(pages(6), own[3:])
    assert taken(copies) == [(5, own[1]), (5, own[2]), (6, own[3])]
    assert taken(copies) == []


def test_page_copy_survives_the_release_of_its_source() -> None:
    allocator = PageAllocator(4)
    copies, own = PageCopies(allocator), allocator.allocate(3)
    copies.add(own[:1], own[1:2])
    allocator.release(own[:1])
    copies.add(own[2:], allocator.allocate(1))
    assert taken(copies) == [(own[0], own[1]), (own[2], own[0])]


@given(st.lists(st.tuples(st.sampled_from(["now", "later", "release", "take"]), st.integers(0, 9)), max_size=60))
def test_page_copies_are_made_once_and_for_present_owners_only(steps: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(4)
    copies = PageCopies(allocator)
    held: list[int] = []
    wanted: dict[str, dict[int, int]] = {"now": {}, "later": {}}  # source by target, of pages that are still held
    for number, (action, choice) in enumerate(steps):
        if action == "take":
            assert sorted(taken(copies)) == sorted((source, target) for target, source in wanted["now"].items())
            wanted = {"now": wanted["later"], "later": {}}
        elif action == "release" and held:
            page = held.pop(choice % len(held))
            allocator.release(pages(page))
            wanted["now"].pop(page, None)
            wanted["later"].pop(page, None)
        elif action in wanted and allocator.free:
            page = int(allocator.allocate(1)[0])
            held.append(page)
            wanted[action][page] = number
            (copies.add if action == "now" else copies.add_later)(pages(number), pages(page))
