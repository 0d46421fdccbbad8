"""Tests of grid sizes of Triton attention, which follow from rows, not groups, where host bounds are loose."""

from __future__ import annotations

import pytest
import torch

from tok_kernels import LayerCache
from tok_kernels import launch_config as config
from tok_kernels.attention.triton import varlen_attention
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv import no_split_kv, plan_split_kv


def operands(rows: int) -> Operands:
    cache = LayerCache(*(torch.zeros((1, 16, 8, 64), dtype=torch.bfloat16) for _ in range(2)))
    return Operands(torch.zeros((rows, 32, 64), dtype=torch.bfloat16), cache, torch.zeros((1, 1)), 1.0)


def groups(rows: int, number: int, max_rows: int, max_kv: int) -> varlen_attention.VarlenItems:
    return varlen_attention.VarlenItems(*(torch.zeros(0),) * 5, 0, number, rows, max_rows, max_kv, torch.zeros(0))


@pytest.mark.parametrize("rows", [1, 8, 64, 512, 8192])
@pytest.mark.parametrize("number", [1, 8, 64, 256])
def test_tile_count_grows_with_rows_and_not_with_rows_times_groups(rows: int, number: int) -> None:
    launched, _ = varlen_attention._item_tile_counts(operands(rows), groups(rows, number, rows, 1000))
    tile_rows = config.tile_launch(64, torch.bfloat16).rows
    needed = -(-rows * 4 // tile_rows)
    assert needed <= launched <= 2 * (needed + min(number, rows))


def test_groups_of_known_size_get_their_tile_count_without_a_search() -> None:
    assert varlen_attention._item_tile_counts(operands(8192), groups(8192, 8, 1024, 704)) == (512, 64)


def test_a_full_batch_with_shared_pages_gets_no_split_kv() -> None:
    assert not varlen_attention.splits_pay(operands(8192), groups(8192, 256, 8192, 128 * 1024))
    assert plan_split_kv(8192, 8, busy_rows=264, target_chunks=264, max_kv=128 * 1024) is None


@pytest.mark.parametrize("rows", [1, 16, 132, 512])
@pytest.mark.parametrize("max_kv", [128, 1024, 8192, 131072])
def test_split_kv_plan_of_few_rows_fills_the_gpu_with_chunks(rows: int, max_kv: int) -> None:
    chunks = plan_split_kv(rows, 8, busy_rows=264, target_chunks=264, max_kv=max_kv)
    if chunks is None:
        assert rows > 66
        assert max_kv < 4096
        return
    assert rows <= chunks.num_chunks <= 264 + rows
    assert chunks.num_chunks <= rows * chunks.max_chunks
    assert chunks.max_chunks * config.MIN_DECODE_SPLIT_KEYS < max_kv + config.MIN_DECODE_SPLIT_KEYS


def test_split_kv_plan_does_not_split_short_rows() -> None:
    assert plan_split_kv(1, 8, busy_rows=264, target_chunks=264, max_kv=config.MIN_DECODE_SPLIT_KEYS) is None
    assert no_split_kv(7).num_chunks == 7
