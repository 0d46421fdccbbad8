"""Tests of Triton attention against a float64 loop: interpreted on the CPU, and compiled on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_cases import Case, Runs, Shape, build, flat, oracle, spoil, without_unseen
from support.attention_checks import TOLERANCE, attend, check
from support.interpreted import INTERPRETING, outside, rerun
from tok_kernels import AttentionBatch, CascadeLevel, LayerCache
from tok_kernels import launch_config as config
from tok_kernels.attention.triton import attention, cascade, split_kv, varlen_attention
from tok_kernels.attention.triton.decode import decode_by_chunks
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv_partials import new_partials

pytestmark = pytest.mark.usefixtures("small_device")

# The interpreter cannot multiply bfloat16.
DTYPES = [dtype for dtype in TOLERANCE if not (INTERPRETING and dtype == torch.bfloat16)]


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def split_everything(
    monkeypatch: pytest.MonkeyPatch, programs: int = 6, keys: int = 8, max_merged_parts: int = 16
) -> None:
    """Split all keys, as for few long sequences on a large GPU: each program gets `keys` keys.

    Up to `max_merged_parts` partial results of a row are merged by the decode kernel; more by the merging kernel.
    """
    monkeypatch.setattr(cascade, "_MAX_MERGED_PARTS", max_merged_parts)
    for name in ("MIN_DECODE_SPLIT_KEYS", "MIN_TILE_SPLIT_KEYS"):
        monkeypatch.setattr(config, name, keys)
    monkeypatch.setattr(config, "multiprocessors", lambda _device: programs)


# Kernels are compiled for each of these on a GPU, so that there are few; the interpreter compiles nothing.
MODELS = [
    Shape(page_size, kv_heads, group, head_dim, runs=(), prefill=(), seed=0)
    for page_size, kv_heads, group, head_dim in (
        ((1, 1, 4, 16), (4, 2, 1, 24), (16, 1, 2, 32), (8, 2, 3, 16))
        if INTERPRETING
        else ((16, 2, 4, 64), (4, 1, 7, 24))
    )
]
suffixes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
subruns = st.lists(st.tuples(st.integers(0, 2), suffixes), min_size=1, max_size=2).map(tuple)
shapes = st.builds(
    lambda model, **drawn: replace(model, **drawn),
    model=st.sampled_from(MODELS),
    runs=st.lists(st.tuples(st.integers(0, 3), subruns), max_size=3).map(tuple),
    prefill=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), max_size=3).map(tuple),
    seed=st.integers(0, 2**32 - 1),
).filter(lambda shape: shape.runs or shape.prefill)

MIXED = Shape(
    page_size=16,
    kv_heads=1,
    group=4,
    head_dim=64,
    runs=((3, ((0, (1, 2, 15, 17)), (1, (33,)))), (2, ((1, (5, 20)), (2, (30, 46))))),
    prefill=((40, 0), (3, 90), (33, 17)),
    seed=3,
)


@settings(max_examples=4 if INTERPRETING else 60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes)
def test_attention_of_any_mixed_step_equals_a_float64_loop(shape: Shape, device: torch.device) -> None:
    check(build(shape, device))


@settings(max_examples=4 if INTERPRETING else 60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes,
    programs=st.integers(1, 4 if INTERPRETING else 20),
    keys=st.integers(1, 40),
    max_merged_parts=st.sampled_from((0, 1000)),
)
def test_split_kv_attention_of_any_mixed_step_equals_a_float64_loop(
    shape: Shape, programs: int, keys: int, max_merged_parts: int, device: torch.device
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        split_everything(patch, programs, keys, max_merged_parts)
        check(build(shape, device))


@settings(max_examples=3 if INTERPRETING else 60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, window=st.integers(1, 100), programs=st.integers(1, 4), keys=st.integers(1, 40))
def test_a_sliding_window_hides_earlier_keys_from_each_query(
    shape: Shape, window: int, programs: int, keys: int, device: torch.device
) -> None:
    case = without_unseen(build(shape, device), window)
    check(case, window=window)
    with pytest.MonkeyPatch.context() as patch:
        split_everything(patch, programs, keys)
        check(case, window=window)


# Windows below a page, of a page, about as long as a group's prefix, and beyond every sequence.
SIZES, SPLIT = (1, 16, 40, 10_000), (True, False)
WINDOWS = list(zip(SIZES, cycle(SPLIT), strict=False) if INTERPRETING else product(SIZES, SPLIT))


@pytest.mark.parametrize(("window", "split"), WINDOWS)
def test_sliding_windows_of_every_size_in_cascade_decode_and_prefill(
    window: int, split: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        split_everything(monkeypatch)
    case = build(replace(MIXED, head_dim=16), device)
    check(without_unseen(case, window), window=window)
    check(without_unseen(flat(case), window), window=window)


def test_cascade_attention_equals_attention_without_prefix_groups(device: torch.device) -> None:
    case = build(MIXED, device)
    check(case, attention(flat(case).q, case.cache, flat(case).batch, case.scale))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_every_head_dim_and_dtype_is_within_tolerance(
    head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    runs: Runs = ((2, ((0, (3, 18)),)),)
    small = replace(MIXED, head_dim=head_dim, runs=runs, prefill=((5, 14),), page_size=8)
    check(build(small if INTERPRETING else replace(MIXED, head_dim=head_dim), device, dtype))


@pytest.mark.parametrize("page_size", [1, 2, 32, 128, 1024])
def test_attention_over_pages_of_every_power_of_two(page_size: int, device: torch.device) -> None:
    runs: Runs = ((min(1, 32 // page_size), ((0, (3, page_size + 1)),)),)
    prefill = ((5, max(page_size - 2, 0)),)
    shape = Shape(page_size, kv_heads=1, group=2, head_dim=16, runs=runs, prefill=prefill, seed=9)
    check(build(shape, device))


def test_attention_takes_queries_that_are_a_view_of_fused_qkv(device: torch.device) -> None:
    case = build(replace(MIXED, runs=MIXED.runs[:1], prefill=((5, 3),)), device)
    tokens, heads, size = case.q.shape
    fused = torch.full((tokens, heads + 2, size), torch.nan, device=device)
    fused[:, :heads] = case.q
    check(replace(case, q=fused[:, :heads]))


def test_attention_is_exact_with_loose_host_bounds(device: torch.device) -> None:
    case = build(replace(MIXED, prefill=((5, 3), (2, 0))), device)
    levels = tuple(replace(level, max_rows=level.max_rows + 3, max_kv=level.max_kv * 2) for level in case.batch.levels)
    batch = replace(case.batch, max_q=case.batch.max_q + 5, max_kv=case.batch.max_kv * 3, levels=levels)
    check(replace(case, batch=batch))


def test_attention_over_more_groups_and_chunks_than_one_search_block(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_attention, "_ITEMS", 4)
    runs = tuple((i % 3, ((0, (1 + i,) * (1 + i % 2)),)) for i in range(9))
    prefill = tuple((1 + 3 * i, i) for i in range(6))
    check(build(replace(MIXED, runs=runs, prefill=prefill, head_dim=16), device))


def test_a_row_with_an_empty_suffix_attends_to_its_prefix_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = build(replace(MIXED, runs=((2, ((0, (16,)),)),), prefill=()), device)
    zero, kv_len = torch.zeros_like(case.batch.kv_len), case.batch.kv_len
    level = CascadeLevel(zero, zero + 1, case.batch.slots, zero, kv_len, max_rows=1, max_kv=48)
    case = replace(case, batch=replace(case.batch, kv_start=kv_len, levels=(level,)))
    check(case)
    split_everything(monkeypatch)
    check(case)


@pytest.mark.parametrize("split", [False, True])
def test_tokens_without_keys_get_zeros_even_from_a_cache_of_nan(
    split: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        split_everything(monkeypatch)
    cache = LayerCache(*(torch.full((2, 4, 1, 16), torch.nan, device=device) for _ in range(2)))

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = AttentionBatch(
        page_table=ints(-1, -1).view(1, 2),  # a padding row owns no page
        slots=ints(0, 0, 0),
        q_start=ints(0, 1, 2, 2),
        kv_len=ints(0, 0, 0),
        kv_start=ints(0, 0, 0),
        num_decode=2,
        max_q=1,
        max_kv=30,
        levels=(CascadeLevel(ints(0), ints(0), ints(0), ints(0), ints(0), max_rows=2, max_kv=30),),
    )
    q = torch.ones((5, 2, 16), device=device)  # three tokens belong to no sequence
    out = attend(Case(q, cache, batch, 1.0))
    assert torch.equal(out, torch.zeros_like(out))


def padded(case: Case, rows: int, groups: int, max_kv: int) -> Case:
    """Return a decode step padded with empty rows and groups to `rows`, `groups` and `max_kv`."""
    batch = case.batch

    def fill(column: Tensor, size: int) -> Tensor:
        return torch.nn.functional.pad(column, (0, size - column.shape[0]))

    levels = tuple(
        CascadeLevel(
            fill(level.row_start, groups),
            fill(level.row_count, groups),
            fill(level.slot, groups),
            fill(level.kv_start, groups),
            fill(level.kv_end, groups),
            max_rows=rows,
            max_kv=max_kv,
        )
        for level in batch.levels
    )
    batch = replace(
        batch,
        slots=fill(batch.slots, rows),
        q_start=torch.arange(rows + 1, dtype=torch.int32, device=batch.slots.device),
        kv_len=fill(batch.kv_len, rows),
        kv_start=fill(batch.kv_start, rows),
        num_decode=rows,
        max_kv=max_kv,
        levels=levels,
    )
    return replace(
        case,
        q=torch.cat((case.q, torch.full_like(case.q[:1], torch.nan).expand(rows - len(case.q), -1, -1))),
        batch=batch,
    )


# A GPU that few rows fill (levels are chained), one that they leave idle (partials are merged), and one on which only
# tiles are split.
LAUNCHES = pytest.mark.parametrize(
    "sizes",
    [(1, 64, 64, 16), (4, 16, 16, 16), (4, 16, 16, 0), (8, 1 << 20, 16, 16)],
    ids=["chain", "split", "split, merging kernel", "tiles"],
)


def launch(
    monkeypatch: pytest.MonkeyPatch, programs: int, decode_keys: int, tile_keys: int, max_merged_parts: int
) -> None:
    split_everything(monkeypatch, programs, max_merged_parts=max_merged_parts)
    monkeypatch.setattr(config, "MIN_DECODE_SPLIT_KEYS", decode_keys)
    monkeypatch.setattr(config, "MIN_TILE_SPLIT_KEYS", tile_keys)


@LAUNCHES
def test_padding_rows_and_groups_change_nothing_and_get_zeros(
    sizes: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, *sizes)
    case = build(replace(MIXED, prefill=(), head_dim=16), device)
    rows, expected = case.batch.num_decode, torch.tensor(oracle(case)[0])
    outer = replace(case, batch=replace(case.batch, levels=case.batch.levels[:1], kv_start=outer_ends(case)))
    for each in (case, outer):
        out = attend(padded(each, rows + 2, groups=8, max_kv=3000))
        assert float((out[:rows].double().cpu() - expected).norm() / expected.norm()) < TOLERANCE[torch.float32]
        assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))


def outer_ends(case: Case) -> Tensor:
    """Return where each row's own keys begin if only the first cascade level is kept."""
    level, starts = case.batch.levels[0], torch.zeros_like(case.batch.kv_start)
    for first, count, end in zip(
        level.row_start.tolist(), level.row_count.tolist(), level.kv_end.tolist(), strict=True
    ):
        starts[first : first + count] = end
    return starts


@LAUNCHES
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_attention_of_a_padding_only_launch_yields_zeros(
    levels: int, sizes: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, *sizes)
    case = build(replace(MIXED, runs=((1, ((1, (5,)),)),), prefill=(), head_dim=16), device)
    batch = replace(case.batch, levels=case.batch.levels[:levels])
    for name in ("kv_len", "kv_start"):
        getattr(batch, name).zero_()
    for level in batch.levels:
        for name in ("row_start", "row_count", "slot", "kv_start", "kv_end"):
            getattr(level, name).zero_()
    out = attend(padded(replace(case, batch=batch), 4, groups=6, max_kv=3000))
    assert torch.equal(out, torch.zeros_like(out))


@LAUNCHES
def test_an_ended_row_of_a_group_attends_to_the_shared_prefix_only(
    sizes: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, *sizes)
    case = build(replace(MIXED, runs=((0, ((3, (1, 9, 40)),)),), prefill=(), head_dim=16), device)
    expected = torch.tensor(oracle(case)[0])
    shared = torch.full_like(case.batch.kv_len, 48)
    alone = replace(case, batch=replace(case.batch, kv_len=shared, kv_start=torch.zeros_like(shared), levels=()))
    expected[1] = torch.tensor(oracle(alone)[0])[1]
    case.batch.kv_len[1] = 0  # below kv_start, 48
    check(padded(case, 3, groups=6, max_kv=3000), expected)


def test_one_attention_launch_serves_rows_of_any_length_below_its_bound(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_everything(monkeypatch, programs=3, keys=16)
    for lengths in ((300,), (1, 300, 2, 33), (0, 0, 200, 0)):
        runs: Runs = ((0, ((0, tuple(max(length, 1) for length in lengths)),)),)
        case = build(replace(MIXED, runs=runs, prefill=(), head_dim=16), device)
        expected = torch.tensor(oracle(case)[0])
        ended = torch.tensor(lengths, device=device) == 0
        case.batch.kv_len[ended] = 0
        expected[ended.cpu()] = 0.0
        check(padded(flat(case), len(lengths), groups=1, max_kv=100_000), expected)


def test_split_kv_gives_long_rows_more_chunks_than_short_rows(device: torch.device) -> None:
    lengths = (700, 0, 64, 5000, 1)
    case = build(
        replace(MIXED, runs=((0, ((0, tuple(max(n, 1) for n in lengths)),)),), prefill=(), head_dim=16), device
    )
    expected = torch.tensor(oracle(case)[0])
    case.batch.kv_len[1], expected[1] = 0, 0.0
    case = padded(flat(case), 5, groups=1, max_kv=100_000)
    operands = Operands(case.q, case.cache, case.batch.page_table, case.scale)
    chunks = split_kv.SplitKVPlan(num_chunks=25, target_chunks=20, min_keys=64, max_chunks=16)
    parts, out = new_partials(case.q, 0, chunks=25, filled=False), torch.empty_like(case.q)
    parts.lse.fill_(torch.inf)
    decode_by_chunks(operands, case.batch, chunks, out, parts)
    written = parts.lse.isfinite().all(-1).nonzero()[:, 0].tolist()
    # 182 blocks of 32 keys over 20 programs make chunks of up to 10 blocks, split evenly within a row. Rows 0 and 3
    # have 3 and 16 chunks; the others have one, which is no partial result.
    assert written == [0, 1, 2, *range(5, 21)]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-5, atol=1e-5)


def test_large_attention_scores_do_not_overflow(device: torch.device) -> None:
    case = build(replace(MIXED, prefill=((5, 30),)), device)
    check(replace(case, q=case.q * 0.0 + 1.0, cache=LayerCache(case.cache.k.sign() * 50.0, case.cache.v)))


@pytest.mark.parametrize("split", [False, True])
def test_a_nan_key_makes_only_the_rows_that_attend_to_it_nan(
    split: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        split_everything(monkeypatch)
    case = build(replace(MIXED, head_dim=16), device)
    expected = torch.tensor(oracle(case)[0])
    # A key of row 1, a key in the page shared by rows 7 and 8, and the last key of the last prefill chunk.
    spoil(case, (1, int(case.batch.kv_len[1]) - 1), (8, 40), (-1, int(case.batch.kv_len[-1]) - 1))
    chunk = int(case.batch.q_start[-2])
    rest = [row for row in range(chunk) if row not in (1, 7, 8)]
    for each in (case, flat(case)):
        out = attend(each).double().cpu()
        assert out[[1, 7, 8, -1]].isnan().all()
        torch.testing.assert_close(out[rest], expected[rest], rtol=1e-5, atol=1e-5)


def test_attention_of_zero_tokens_returns_no_rows(device: torch.device) -> None:
    case = build(MIXED, device)
    empty = torch.empty(0, dtype=torch.int32, device=device)
    batch = AttentionBatch(case.batch.page_table, empty, empty.new_zeros(1), empty, empty, 0, 0, 0)
    assert attention(case.q[:0], case.cache, batch, 1.0).shape == (0, 4, 64)


def test_attention_refuses_unsupported_dtypes_and_shapes_by_name(device: torch.device) -> None:
    case = build(replace(MIXED, runs=(), prefill=((2, 0),)), device)
    three = LayerCache(*(torch.zeros((4, 3, 1, 64), device=device) for _ in range(2)))
    wide = LayerCache(*(torch.zeros((4, 4, 1, 300), device=device) for _ in range(2)))
    for q, cache, scale, message in (
        (case.q.double(), case.cache, 1.0, "q's dtype is torch.float64; allowed: one of"),
        (case.q, three, 1.0, "page_size is 3; allowed: a power of two"),
        (case.q.new_zeros(2, 4, 300), wide, 1.0, "head_dim is 300; allowed: at most 256"),
        (case.q[..., ::2], case.cache, 1.0, "head size of k is 64; allowed: q's, 32"),
        (case.q.transpose(1, 2).contiguous().transpose(1, 2), case.cache, 1.0, "q's last stride is 4; allowed: 1"),
        (case.q, case.cache, 0.0, "scale is 0.0; allowed: positive"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(q, cache, case.batch, scale)
    with pytest.raises(ValueError, match="window is 0; allowed: None, or integers from 1"):
        attention(case.q, case.cache, case.batch, case.scale, 0)
