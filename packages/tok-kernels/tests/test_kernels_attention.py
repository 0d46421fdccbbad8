"""Paged and cascade attention against a loop in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tok_kernels import AttentionBatch, CascadeLevel, LayerCache, choose
from tok_kernels.reference import attention_with_lse, pieces

# Shared pages, and below them the shared pages of subgroups, and below them the own tokens of each row.
Runs = tuple[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]], ...]


@dataclass(frozen=True)
class Shape:
    """What is drawn: runs of decode rows sharing pages on two levels, and prefill chunks."""

    page_size: int
    kv_heads: int
    group: int
    head_dim: int
    runs: Runs
    prefill: tuple[tuple[int, int], ...]  # (new tokens, cached tokens)
    seed: int


@dataclass(frozen=True)
class Case:
    q: Tensor
    cache: LayerCache
    batch: AttentionBatch
    scale: float


suffixes = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)
subruns = st.lists(st.tuples(st.integers(0, 2), suffixes), min_size=1, max_size=2).map(tuple)
shapes = st.builds(
    Shape,
    page_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([16, 24, 32]),
    runs=st.lists(st.tuples(st.integers(0, 3), subruns), max_size=4).map(tuple),
    prefill=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), max_size=3).map(tuple),
    seed=st.integers(0, 2**32 - 1),
).filter(lambda shape: shape.runs or shape.prefill)


class Pool:
    """Hands out page ids in random order, and keeps which rows of which pages were written."""

    def __init__(self, pages: int, page_size: int, rng: np.random.Generator) -> None:
        self.free = rng.permutation(pages).tolist()
        self.page_size = page_size
        self.written = np.zeros((pages, page_size), dtype=bool)

    def take(self, positions: int) -> list[int]:
        pages = [self.free.pop() for _ in range(-(-positions // self.page_size))]
        for i, page in enumerate(pages):
            self.written[page, : positions - i * self.page_size] = True
        return pages


def build(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> Case:
    """A step of that shape, in a cache that holds NaN wherever no sequence has written."""
    rng, ps = np.random.default_rng(shape.seed), shape.page_size
    pool = Pool(2000 // ps + 300, ps, rng)
    tables: list[list[int]] = []
    kv_len: list[int] = []
    kv_start: list[int] = []
    levels: tuple[list[tuple[int, ...]], ...] = ([], [])  # (row_start, row_count, slot row, kv_start, kv_end)
    for outer, subs in shape.runs:
        first, outer_pages = len(tables), pool.take(outer * ps)
        for inner, lengths in subs:
            sub_first, shared = len(tables), outer_pages + pool.take(inner * ps)
            for length in lengths:
                tables.append(shared + pool.take(length))
                kv_len.append(len(shared) * ps + length)
                kv_start.append(len(shared) * ps)
            levels[1].append((sub_first, len(lengths), sub_first, outer * ps, len(shared) * ps))
        levels[0].append((first, len(tables) - first, first, 0, outer * ps))
    decode = len(tables)
    for new, cached in shape.prefill:
        tables.append(pool.take(new + cached))
        kv_len.append(new + cached)
        kv_start.append(0)
    q_len = [1] * decode + [new for new, _ in shape.prefill]
    slots = rng.permutation(len(tables) + 2)[: len(tables)]
    page_table = np.full((len(tables) + 2, max(map(len, tables)) + 2), pool.free.pop())
    for slot, table in zip(slots, tables, strict=True):
        page_table[slot, : len(table)] = table

    def ints(values: object) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)

    def level(groups: list[tuple[int, ...]]) -> CascadeLevel:
        # An empty group stands for the padding of a fixed-size launch.
        column = np.array([*groups, (0, 0, 0, 0, 0)]).T
        rows, lengths = int(column[1].max()), int((column[4] - column[3]).max())
        row_start, row_count, slot_row, start, end = column
        return CascadeLevel(
            ints(row_start), ints(row_count), ints(slots[slot_row]), ints(start), ints(end), rows, lengths
        )

    def noise(*size: int) -> Tensor:
        return torch.tensor(rng.standard_normal(size), dtype=dtype, device=device)

    gap = torch.tensor(~pool.written, device=device)[..., None, None]
    kv_size = (*pool.written.shape, shape.kv_heads, shape.head_dim)
    cache = LayerCache(noise(*kv_size).masked_fill(gap, torch.nan), noise(*kv_size).masked_fill(gap, torch.nan))
    batch = AttentionBatch(
        page_table=ints(page_table),
        slots=ints(slots),
        q_start=ints(np.cumsum([0, *q_len])),
        kv_len=ints(kv_len),
        kv_start=ints(kv_start),
        num_decode=decode,
        max_q=max(q_len),
        max_kv=max(kv_len),
        levels=tuple(level(groups) for groups in levels) if decode else (),
    )
    q = noise(sum(q_len), shape.kv_heads * shape.group, shape.head_dim)
    return Case(q, cache, batch, shape.head_dim**-0.5)


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """One query token at a time, over all its positions, in float64; knows nothing of groups."""
    q, k, v = (x.double().cpu().numpy() for x in (case.q, case.cache.k, case.cache.v))
    table, slots, q_start, kv_len = (
        x.cpu().numpy() for x in (case.batch.page_table, case.batch.slots, case.batch.q_start, case.batch.kv_len)
    )
    ps, group = case.cache.page_size, q.shape[1] // k.shape[2]
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    for b, slot in enumerate(slots):
        for t in range(q_start[b], q_start[b + 1]):
            position = np.arange(kv_len[b] - (q_start[b + 1] - t) + 1)
            page, offset = table[slot, position // ps], position % ps
            keys, values = (np.repeat(x[page, offset], group, axis=1) for x in (k, v))
            score = np.einsum("hd,lhd->hl", q[t], keys) * case.scale
            weight = np.exp(score - score.max(-1, keepdims=True))
            out[t] = np.einsum("hl,lhd->hd", weight / weight.sum(-1, keepdims=True), values)
            lse[t] = np.log(weight.sum(-1)) + score.max(-1)
    return out, lse


def check(case: Case, rtol: float = 0.0) -> None:
    compare(case, oracle(case), rtol)


def compare(case: Case, expected: tuple[np.ndarray, np.ndarray], rtol: float = 0.0) -> None:
    out, lse = attention_with_lse(case.q, case.cache, case.batch, case.scale)
    expected_out, expected_lse = expected
    np.testing.assert_allclose(out.double().cpu().numpy(), expected_out, rtol=rtol, atol=1e-5)
    np.testing.assert_allclose(lse.double().cpu().numpy(), expected_lse, rtol=2.0**-23, atol=1e-5)


def flat(case: Case) -> Case:
    batch = replace(case.batch, kv_start=torch.zeros_like(case.batch.kv_start), levels=())
    return replace(case, batch=batch)


@settings(max_examples=40, deadline=None)
@given(shape=shapes)
def test_any_mixed_step_equals_the_loop_in_float64(shape: Shape, device: torch.device) -> None:
    case = build(shape, device)
    expected = oracle(case)
    compare(case, expected)
    compare(flat(case), expected)


@settings(max_examples=15, deadline=None)
@given(shape=shapes)
def test_bfloat16_differs_from_the_loop_only_by_the_rounding_of_the_result(shape: Shape, device: torch.device) -> None:
    check(build(shape, device, torch.bfloat16), rtol=2.0**-8)


LARGE = Shape(
    page_size=16,
    kv_heads=2,
    group=2,
    head_dim=64,
    runs=((3, ((0, tuple(range(1, 33))),)), (2, ((1, tuple(range(5, 21))), (2, tuple(range(30, 46)))))),
    prefill=((70, 0), (3, 90), (33, 17)),
    seed=3,
)


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("head_dim", [16, 256])
def test_decode_batches_of_every_size_and_head_dim(batch: int, head_dim: int, device: torch.device) -> None:
    run = ((0, ((0, tuple(1 + 7 * i % 50 for i in range(batch))),)),)
    check(build(replace(LARGE, runs=run, prefill=(), head_dim=head_dim), device))


def test_float16_is_computed_in_float32(device: torch.device) -> None:
    check(build(LARGE, device, torch.float16), rtol=2.0**-11)


@pytest.mark.parametrize("budget", [1000, 10_000, 100_000])
def test_cutting_a_step_into_smaller_pieces_changes_nothing(
    budget: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_CPU_BUDGET", budget)
    monkeypatch.setattr(pieces, "_BUDGET", budget)
    check(build(LARGE, device))


def test_host_bounds_may_be_loose(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a device whose lengths the host does not read.
    monkeypatch.setattr(pieces, "_tight", lambda _name, _lengths, bound: bound)
    case = build(LARGE, device)
    levels = tuple(replace(level, max_rows=level.max_rows + 3, max_kv=level.max_kv * 2) for level in case.batch.levels)
    batch = replace(case.batch, max_q=case.batch.max_q + 5, max_kv=case.batch.max_kv * 3, levels=levels)
    check(replace(case, batch=batch))


def test_host_bounds_that_are_too_low_are_refused_by_name() -> None:
    case = build(LARGE, torch.device("cpu"))
    for field, batch in (
        ("max_q", replace(case.batch, max_q=2)),
        ("max_kv", replace(case.batch, max_kv=2)),
    ):
        with pytest.raises(ValueError, match=f"{field} is 2, below"):
            attention_with_lse(case.q, case.cache, batch, case.scale)


def test_a_suffix_without_keys_leaves_the_prefix_alone(device: torch.device) -> None:
    case = build(replace(LARGE, runs=((2, ((0, (16,)),)),), prefill=()), device)
    zero, kv_len = torch.zeros_like(case.batch.kv_len), case.batch.kv_len
    level = CascadeLevel(zero, zero + 1, case.batch.slots, zero, kv_len, max_rows=1, max_kv=48)
    check(replace(case, batch=replace(case.batch, kv_start=kv_len, levels=(level,))))


def test_tokens_without_keys_get_zeros_even_from_a_cache_of_nan(device: torch.device) -> None:
    cache = LayerCache(*(torch.full((2, 4, 1, 16), torch.nan, device=device) for _ in range(2)))

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = AttentionBatch(
        page_table=ints(-1, -1).view(1, 2),  # a padding row owns no page
        slots=ints(0, 0),
        q_start=ints(0, 1, 2),
        kv_len=ints(0, 0),
        kv_start=ints(0, 0),
        num_decode=2,
        max_q=1,
        max_kv=8,
    )
    q = torch.ones((5, 2, 16), device=device)  # three tokens belong to no sequence
    out, lse = attention_with_lse(q, cache, batch, 1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_a_step_without_tokens_yields_no_rows() -> None:
    case = build(LARGE, torch.device("cpu"))
    empty = torch.empty(0, dtype=torch.int32)
    batch = AttentionBatch(case.batch.page_table, empty, empty.new_zeros(1), empty, empty, 0, 0, 0)
    assert choose(torch.device("cpu")).attention(case.q[:0], case.cache, batch, 1.0).shape == (0, 4, 64)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = build(LARGE, device)
    check(replace(case, q=case.q * 0.0 + 1.0, cache=LayerCache(case.cache.k.sign() * 50.0, case.cache.v)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_on_a_cuda_device_never_waits_for_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = build(LARGE, torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_with_lse(case.q, case.cache, case.batch, case.scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
