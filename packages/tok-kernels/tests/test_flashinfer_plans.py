"""Tests of FlashInfer's plan inputs, page lists and cascade levels as items, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tok_kernels.attention.flashinfer import unsupported_reason
from tok_kernels.attention.flashinfer.cascade import level_items
from tok_kernels.attention.flashinfer.pages import page_lists
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.batch import HostLevel

PAGE = 4
SHAPE = AttentionShape(8, 2, 64, PAGE, 2, torch.bfloat16, torch.bfloat16)


def ints(values: object) -> np.ndarray:
    return np.asarray(values, np.int32)


@given(
    items=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=12),
    seed=st.integers(0, 2**32 - 1),
)
def test_page_lists_name_the_pages_of_every_item_in_order(items: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = torch.from_numpy(ints(rng.permutation(16 * 15).reshape(16, 15)))
    slots = ints(rng.integers(0, 16, len(items)))
    start = ints([first * PAGE for first, _ in items])
    end = start + ints([length for _, length in items])
    lists = page_lists(table, torch.from_numpy(slots), start, end, PAGE)
    for i, slot in enumerate(slots):
        pages = lists.indices[lists.indptr[i] : lists.indptr[i + 1]].tolist()
        positions = range(start[i], end[i])
        assert pages == list(dict.fromkeys(table[slot, p // PAGE].item() for p in positions))
        assert lists.length[i] == len(positions)
        assert lists.last_page_len[i] == (0 if not pages else len(positions) - (len(pages) - 1) * PAGE)
    assert {each.dtype for each in (lists.indptr, lists.indices, lists.last_page_len, lists.length)} == {torch.int32}


def test_an_item_that_ends_before_it_starts_has_no_pages() -> None:
    table = torch.arange(8, dtype=torch.int32).view(1, 8)
    lists = page_lists(table, torch.zeros(2, dtype=torch.int32), ints([8, 0]), ints([0, 5]), PAGE)
    assert lists.indptr.tolist() == [0, 0, 2]
    assert lists.indices.tolist() == [0, 1]
    assert lists.length.tolist() == [0, 5]


def test_a_kv_start_within_a_page_is_refused_by_name() -> None:
    table = torch.zeros((1, 8), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"kv_start is 6; allowed: multiples of the page size \(4\)"):
        page_lists(table, torch.zeros(2, dtype=torch.int32), ints([4, 6]), ints([9, 9]), PAGE)


groups = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2)), max_size=6)


@given(groups=groups, after=st.integers(0, 3), order=st.randoms(use_true_random=False))
def test_level_items_cover_all_rows_with_the_keys_of_their_groups(
    groups: list[tuple[int, int, int]], after: int, order: st.DataObject
) -> None:
    wanted: list[tuple[int, int]] = []  # the key range of each row
    columns: list[tuple[int, int, int, int]] = []
    for gap, count, pages in groups:
        wanted += [(0, 0)] * gap
        columns.append((len(wanted), count, PAGE, PAGE + pages * PAGE))
        wanted += [(PAGE, PAGE + pages * PAGE) if pages else (0, 0)] * count
    wanted += [(0, 0)] * (after + 1)
    order.shuffle(columns)  # type: ignore[attr-defined]
    level = HostLevel(*ints(columns).reshape(-1, 4).T)
    items = level_items(level, len(wanted))
    assert items.indptr[0] == 0
    assert items.indptr[-1] == len(wanted)
    found = [
        (int(items.start[i]), int(items.end[i])) for i, count in enumerate(np.diff(items.indptr)) for _ in range(count)
    ]
    assert found == wanted
    assert items.covered.tolist() == [end > start for start, end in wanted]
    for group, start, end in zip(items.group, items.start, items.end, strict=True):
        assert end == start == 0 or (level.kv_start[group], level.kv_end[group]) == (start, end)


def test_flashinfer_is_unusable_on_a_cpu() -> None:
    assert unsupported_reason(SHAPE, torch.device("cpu")) == "FlashInfer does not run on cpu"
