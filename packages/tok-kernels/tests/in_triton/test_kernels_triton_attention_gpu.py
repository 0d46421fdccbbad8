"""Tests of Triton attention that need a GPU's size, streams or compiler."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from support.attention_cases import Runs, Shape, build, flat, oracle, without_unseen
from support.attention_checks import TOLERANCE, check
from tok_kernels.attention.reference import attention as reference
from tok_kernels.attention.triton import attention

GROUPED = Shape(page_size=16, kv_heads=2, group=4, head_dim=64, runs=(), prefill=(), seed=5)
CUDA = torch.device("cuda")


def runs_of(batch: int) -> Runs:
    """Return `batch` rows in groups of 1 to 900, with prefixes of 0 to 5 pages and 1 to 50 tokens of their own."""
    sizes = (1, 7, 900, 64)
    runs: list[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]]] = []
    while batch:
        size = min(sizes[len(runs) % 4], batch)
        runs.append((len(runs) % 6, ((len(runs) % 2, tuple(1 + i % 50 for i in range(size))),)))
        batch -= size
    return tuple(runs)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 33, 264, 2048, 8192])
def test_decode_batches_of_every_size_equal_the_reference(batch: int) -> None:
    case = build(replace(GROUPED, runs=runs_of(batch)), CUDA, torch.bfloat16)
    check(case, reference(case.q.float(), case.cache, case.batch, case.scale))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1500, 6000])
def test_one_level_cascade_attention_in_a_graph_matches_the_reference(rows: int) -> None:
    runs = tuple((1 + i % 50, ((0, tuple(1 + j % 70 for j in range(rows // 100))),)) for i in range(100))
    case = build(replace(GROUPED, runs=runs), CUDA, torch.bfloat16)
    case = replace(case, batch=replace(case.batch, levels=case.batch.levels[:1]))
    attention(case.q, case.cache, case.batch, case.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(case.q, case.cache, case.batch, case.scale)
    expected = reference(case.q.float(), case.cache, case.batch, case.scale)
    for _ in range(20):  # a kernel that starts before its predecessor has ended would differ now and then
        out.fill_(torch.nan)
        graph.replay()
        assert float((out.float() - expected).norm() / expected.norm()) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [3, 700, 4096])
@pytest.mark.parametrize("rows", [4, 1500])
def test_sliding_windows_in_a_replayed_graph_follow_new_lengths(window: int, rows: int) -> None:
    runs = tuple((40 + i, ((0, tuple(1 + 37 * j % 900 for j in range(rows // 2))),)) for i in range(2))
    case = build(replace(GROUPED, runs=runs), CUDA, torch.bfloat16)
    case = replace(case, batch=replace(case.batch, levels=case.batch.levels[:1]))
    attention(case.q, case.cache, case.batch, case.scale, window)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(case.q, case.cache, case.batch, case.scale, window)
    for shorter in (0, 1):
        case.batch.kv_len.copy_(torch.maximum(case.batch.kv_len - shorter, case.batch.kv_start + 1))
        expected = reference(case.q.float(), case.cache, case.batch, case.scale, window)
        out.fill_(torch.nan)
        graph.replay()
        assert float((out.float() - expected).norm() / expected.norm()) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_long_prompts_with_sliding_windows_equal_the_reference() -> None:
    case = build(replace(GROUPED, prefill=((300, 5000), (2000, 0), (1, 900))), CUDA, torch.bfloat16)
    for window in (1, 100, 4096):
        seen = without_unseen(case, window)
        check(seen, reference(seen.q.float(), seen.cache, seen.batch, seen.scale, window), window)


@pytest.mark.gpu
def test_split_kv_attention_of_one_long_sequence_equals_the_reference() -> None:
    case = build(replace(GROUPED, runs=((3, ((0, (1500,)),)),), prefill=((7, 1500),)), CUDA, torch.bfloat16)
    check(case, reference(case.q.float(), case.cache, case.batch, case.scale))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_attention_never_synchronizes_with_the_device() -> None:
    case = build(replace(GROUPED, runs=runs_of(40), prefill=((70, 20),)), CUDA, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(case.q, case.cache, case.batch, case.scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_graph_replays_with_new_lengths_groups_and_pages() -> None:
    first, other = (
        build(replace(GROUPED, runs=runs, prefill=prefill), CUDA, torch.bfloat16)
        for runs, prefill in (
            (((2, ((0, (5, 9, 40)), (1, (7,)))), (3, ((0, (3, 3)),))), ((30, 2), (1, 0))),
            (((1, ((0, (12,)), (2, (1, 20)))), (0, ((0, (44, 5, 9)),))), ((11, 30), (20, 0))),
        )
    )
    q, cache, batch = torch.empty_like(first.q), first.cache, first.batch
    q.copy_(first.q)
    levels = tuple(replace(level, max_rows=6, max_kv=96) for level in batch.levels)
    batch = replace(batch, max_q=30, max_kv=128, levels=levels)
    attention(q, cache, batch, first.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, cache, batch, first.scale)
    for name in ("slots", "q_start", "kv_len", "kv_start"):
        getattr(batch, name).copy_(getattr(other.batch, name))
    for level, new in zip(batch.levels, other.batch.levels, strict=True):
        for name in ("row_start", "row_count", "slot", "kv_start", "kv_end"):
            getattr(level, name).copy_(getattr(new, name))
    width = min(batch.page_table.shape[1], other.batch.page_table.shape[1])
    batch.page_table[:, :width] = other.batch.page_table[:, :width]
    for ours, theirs in ((q, other.q), (cache.k, other.cache.k), (cache.v, other.cache.v)):
        ours.copy_(theirs)
    out.fill_(torch.nan)
    graph.replay()
    expected = torch.tensor(oracle(other)[0])
    assert float((out.double().cpu() - expected).norm() / expected.norm()) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_attention_does_not_recompile_for_other_batch_sizes() -> None:
    knobs = importlib.import_module("triton").knobs  # Triton has no type stubs

    def step(batch: int, prefill: tuple[tuple[int, int], ...]) -> None:
        shape = replace(GROUPED, head_dim=48, runs=runs_of(batch), prefill=prefill)
        case = build(shape, CUDA, torch.bfloat16)
        for each in (case, flat(case)):
            attention(each.q, each.cache, each.batch, each.scale)

    compiled: list[object] = []
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda **what: compiled.append(what["repr"])
    try:
        step(1, ((3, 300),))  # few rows: split-KV attention, whose partials are merged
        step(1100, ())  # many rows: levels are chained
        assert compiled  # no other test has this head size
        compiled.clear()
        for batch, prefill in ((16, ((1, 0),)), (0, ((16, 16),) * 16), (600, ()), (1500, ((400, 0),)), (1, ())):
            step(batch, prefill)
    finally:
        knobs.runtime.jit_cache_hook = before
    assert compiled == []
