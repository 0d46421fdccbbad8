"""Tests of the reference's paged and cascade attention against a float64 loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_cases import Case, Shape, build, flat, oracle, spoil, without_unseen
from tok_kernels import AttentionBatch, CascadeLevel, LayerCache, choose
from tok_kernels.attention import reference_pieces as pieces
from tok_kernels.attention.reference import attention_with_lse

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


def check(case: Case, rtol: float = 0.0) -> None:
    compare(case, oracle(case), rtol)


def compare(case: Case, expected: tuple[np.ndarray, np.ndarray], rtol: float = 0.0, window: int | None = None) -> None:
    out, lse = attention_with_lse(case.q, case.cache, case.batch, case.scale, window)
    expected_out, expected_lse = expected
    np.testing.assert_allclose(out.double().cpu().numpy(), expected_out, rtol=rtol, atol=1e-5)
    np.testing.assert_allclose(lse.double().cpu().numpy(), expected_lse, rtol=2.0**-23, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(shape=shapes)
def test_attention_of_any_mixed_step_equals_a_float64_loop(shape: Shape, device: torch.device) -> None:
    case = build(shape, device)
    expected = oracle(case)
    compare(case, expected)
    compare(flat(case), expected)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, window=st.integers(1, 100), budget=st.sampled_from([100, 1 << 20]))
def test_a_sliding_window_hides_earlier_keys_from_each_query(
    shape: Shape, window: int, budget: int, device: torch.device
) -> None:
    case = without_unseen(build(shape, device), window)
    expected = oracle(case, window)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_MAX_CPU_ELEMENTS", "_MAX_ELEMENTS"):
            patch.setattr(pieces, name, budget)
        compare(case, expected, window=window)
        compare(flat(case), expected, window=window)
        patch.setattr(pieces, "_tight_bound", lambda _name, _lengths, bound: bound)  # as on a GPU
        compare(case, expected, window=window)


@settings(max_examples=15, deadline=None)
@given(shape=shapes)
def test_bfloat16_attention_rounds_only_its_result(shape: Shape, device: torch.device) -> None:
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
def test_attention_of_decode_batches_of_every_size_and_head_dim(
    batch: int, head_dim: int, device: torch.device
) -> None:
    run = ((0, ((0, tuple(1 + 7 * i % 50 for i in range(batch))),)),)
    check(build(replace(LARGE, runs=run, prefill=(), head_dim=head_dim), device))


def test_float16_attention_is_computed_in_float32(device: torch.device) -> None:
    check(build(LARGE, device, torch.float16), rtol=2.0**-11)


@pytest.mark.parametrize("budget", [1000, 10_000, 100_000])
def test_attention_computed_in_smaller_pieces_is_unchanged(
    budget: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_MAX_CPU_ELEMENTS", budget)
    monkeypatch.setattr(pieces, "_MAX_ELEMENTS", budget)
    check(build(LARGE, device))


def test_attention_is_exact_with_loose_host_bounds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU the host does not read lengths, and uses the bounds as they are.
    monkeypatch.setattr(pieces, "_tight_bound", lambda _name, _lengths, bound: bound)
    case = build(LARGE, device)
    levels = tuple(replace(level, max_rows=level.max_rows + 3, max_kv=level.max_kv * 2) for level in case.batch.levels)
    batch = replace(case.batch, max_q=case.batch.max_q + 5, max_kv=case.batch.max_kv * 3, levels=levels)
    check(replace(case, batch=batch))


def test_attention_refuses_too_low_host_bounds_by_name() -> None:
    case = build(LARGE, torch.device("cpu"))
    for field, batch in (
        ("max_q", replace(case.batch, max_q=2)),
        ("max_kv", replace(case.batch, max_kv=2)),
    ):
        with pytest.raises(ValueError, match=f"{field} is 2; allowed: at least"):
            attention_with_lse(case.q, case.cache, batch, case.scale)


def test_a_row_with_an_empty_suffix_attends_to_its_prefix_alone(device: torch.device) -> None:
    case = build(replace(LARGE, runs=((2, ((0, (16,)),)),), prefill=()), device)
    zero, kv_len = torch.zeros_like(case.batch.kv_len), case.batch.kv_len
    level = CascadeLevel(zero, zero + 1, case.batch.slots, zero, kv_len, max_rows=1, max_kv=48)
    check(replace(case, batch=replace(case.batch, kv_start=kv_len, levels=(level,))))


def test_a_sliding_window_bounds_the_gathered_keys() -> None:
    run = ((40, ((0, (9, 20)),)),)
    case = build(replace(LARGE, runs=run, prefill=((10, 700),)), torch.device("cpu"))
    sizes = (len(case.q), 4, 128)
    own = list(pieces.sequence_pieces(case.batch, *sizes, window=50))
    (level,) = pieces.cascade_pieces(case.batch.levels[0], case.batch, *sizes, window=50)
    # The longer decode row has 20 keys of its own. Ten prefill queries see the window of the first and 9 more keys.
    assert [piece.width for piece in own] == [20, 59]
    assert level.width == 41  # of 640: the shorter row's window begins at 649 − 50
    (outside,) = pieces.cascade_pieces(case.batch.levels[0], case.batch, *sizes, window=5)
    assert outside.width == 1
    ended = replace(case.batch, kv_len=case.batch.kv_len * (torch.arange(len(case.batch.kv_len)) > 0))
    (level,) = pieces.cascade_pieces(case.batch.levels[0], ended, *sizes, window=50)
    assert level.width == 30  # the window of the longer row begins at 660 − 50; the other row has ended


def test_an_ended_row_of_a_group_attends_to_the_shared_prefix_only(device: torch.device) -> None:
    case = build(replace(LARGE, runs=((0, ((3, (1, 9, 40)),)),), prefill=()), device)
    out, lse = oracle(case)
    shared = torch.full_like(case.batch.kv_len, 48)
    alone = replace(case, batch=replace(case.batch, kv_len=shared, kv_start=torch.zeros_like(shared), levels=()))
    out[1], lse[1] = (part[1] for part in oracle(alone))
    case.batch.kv_len[1] = 0  # below kv_start, 48
    compare(case, (out, lse))


@pytest.mark.parametrize("page_size", [1, 2, 8, 64, 512, 1024])
def test_attention_over_pages_of_every_power_of_two(page_size: int, device: torch.device) -> None:
    runs = ((min(1, 32 // page_size), ((0, (3, page_size + 1)),)),)
    shape = replace(
        LARGE, page_size=page_size, kv_heads=1, head_dim=16, runs=runs, prefill=((5, max(page_size - 2, 0)),)
    )
    check(build(shape, device))


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


def test_a_nan_key_makes_only_the_rows_that_attend_to_it_nan(device: torch.device) -> None:
    case = build(LARGE, device)
    expected = oracle(case)
    # One NaN key belongs to row 1 alone, although rows 0 and 1 share pages; the other is the last chunk's last key.
    spoil(case, (1, int(case.batch.kv_len[1]) - 1), (-1, int(case.batch.kv_len[-1]) - 1))
    rows = [1, len(case.q) - 1]
    for each in (case, flat(case)):
        out, lse = attention_with_lse(each.q, each.cache, each.batch, each.scale)
        assert out[rows].isnan().all()
        assert lse[rows].isnan().all()
        chunk = int(case.batch.q_start[-2])  # NaN may spread to other queries of the chunk, of the same request
        rest = [row for row in range(chunk) if row != 1]
        np.testing.assert_allclose(out[rest].double().cpu().numpy(), expected[0][rest], atol=1e-5)


def test_attention_of_zero_tokens_returns_no_rows() -> None:
    case = build(LARGE, torch.device("cpu"))
    empty = torch.empty(0, dtype=torch.int32)
    batch = AttentionBatch(case.batch.page_table, empty, empty.new_zeros(1), empty, empty, 0, 0, 0)
    assert choose(torch.device("cpu")).attention(case.q[:0], case.cache, batch, 1.0).shape == (0, 4, 64)


def test_large_attention_scores_do_not_overflow(device: torch.device) -> None:
    case = build(LARGE, device)
    check(replace(case, q=case.q * 0.0 + 1.0, cache=LayerCache(case.cache.k.sign() * 50.0, case.cache.v)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_reference_attention_never_synchronizes_with_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = build(LARGE, torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_with_lse(case.q, case.cache, case.batch, case.scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
