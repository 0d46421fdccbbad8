"""Tests of attention over packs of rows: the rows that verify drafted tokens of one sequence read its keys together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.attention_cases import Case, Shape, build, flat, oracle
from support.attention_checks import attend, check
from support.interpreted import INTERPRETING, outside, rerun
from tok_kernels import launch_config as config

pytestmark = pytest.mark.usefixtures("small_device")

RUNS = ((3, ((0, (9, 2, 15, 17)), (1, (33,)))), (2, ((1, (5, 20)), (2, (30, 46)))))
MIXED = Shape(page_size=16, kv_heads=2, group=4, head_dim=16, runs=RUNS, prefill=((20, 0), (3, 40)), seed=5)


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def split_everything(monkeypatch: pytest.MonkeyPatch, programs: int, keys: int) -> None:
    monkeypatch.setattr(config, "MIN_DECODE_SPLIT_KEYS", keys)
    monkeypatch.setattr(config, "multiprocessors", lambda _device: programs)


def packed(case: Case, counts: list[int], width: int, rng: np.random.Generator) -> Case:
    """Return the step with `counts[b]` rows in place of decode row b, of which each sees one key more than the last.

    Packs have up to `width` of them. Packs are in random order, and empty packs follow.
    """
    batch, decode = case.batch, case.batch.num_decode
    device = case.q.device
    count = torch.tensor(counts, device=device)
    row = torch.cat(
        (
            torch.arange(decode, device=device).repeat_interleave(count),
            torch.arange(decode, len(batch.slots), device=device),
        )
    )
    first = (count.cumsum(0) - count).int()
    rank = torch.arange(int(count.sum()), device=device) - first.repeat_interleave(count)
    kv_len, kv_start = batch.kv_len[row].clone(), batch.kv_start[row]
    rows = len(rank)
    behind = count.repeat_interleave(count) - 1 - rank
    kv_len[:rows] = torch.maximum(kv_len[:rows] - behind, kv_start[:rows].clamp(min=1)).int()
    q_len = batch.q_start.diff()[row]
    levels = tuple(
        replace(
            level,
            row_start=torch.stack(
                [first[int(start)] if n else start for start, n in zip(level.row_start, level.row_count, strict=True)]
            ),
            row_count=torch.stack(
                [count[int(s) : int(s + n)].sum().int() for s, n in zip(level.row_start, level.row_count, strict=True)]
            ),
            max_rows=rows,
        )
        for level in batch.levels
    )
    packs = [
        [int(first[b]) + i for i in range(begin, min(begin + width, n))]
        for b, n in enumerate(counts)
        for begin in range(0, n, width)
    ]
    table = np.full((rows, width), -1, np.int32)
    for place, number in enumerate(rng.permutation(len(packs))):
        table[place, : len(packs[number])] = packs[number]
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    q = torch.randn((int(q_len.sum()), *case.q.shape[1:]), generator=generator).to(case.q)
    return replace(
        case,
        q=q,
        batch=replace(
            batch,
            slots=batch.slots[row],
            q_start=torch.nn.functional.pad(q_len.cumsum(0), (1, 0)).int(),
            kv_len=kv_len,
            kv_start=kv_start,
            num_decode=rows,
            levels=levels,
            packs=torch.tensor(table, device=device),
        ),
    )


@settings(max_examples=6 if INTERPRETING else 60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(1, 6), min_size=9, max_size=9),
    width=st.sampled_from([2, 4, 8] if INTERPRETING else [4]),
    window=st.sampled_from([None, 3, 21]),
    levels=st.booleans(),
    split=st.none() | st.tuples(st.integers(1, 20), st.integers(1, 40)),
    seed=st.integers(0, 99),
)
def test_attention_of_packs_equals_a_float64_loop(
    counts: list[int],
    width: int,
    window: int | None,
    levels: bool,
    split: tuple[int, int] | None,
    seed: int,
    device: torch.device,
) -> None:
    case = build(replace(MIXED, seed=seed), device)
    case = packed(case if levels else flat(case), counts, width, np.random.default_rng(seed))
    with pytest.MonkeyPatch.context() as patch:
        if split is not None:
            split_everything(patch, *split)
        check(case, window=window)


@pytest.mark.parametrize("split", [False, True])
def test_ended_rows_of_packs_get_zeros_and_change_no_other_row(
    split: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        split_everything(monkeypatch, 6, 8)
    case = packed(flat(build(replace(MIXED, prefill=()), device)), [3] * 9, 4, np.random.default_rng(0))
    expected = torch.tensor(oracle(case)[0])
    ended = torch.arange(27) % 3 == 2
    ended[:3] = True  # a whole pack
    case.batch.kv_len[ended.to(device)] = 0
    expected[ended] = 0.0
    check(case, expected)


@pytest.mark.parametrize("split", [False, True])
def test_packs_change_no_bit_of_a_row_that_is_not_split(
    split: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online softmax sees the same blocks, and keys beyond a row's last one add nothing."""
    case = packed(flat(build(replace(MIXED, prefill=()), device)), [4] * 9, 4, np.random.default_rng(1))
    if split:
        split_everything(monkeypatch, 6, 8)
    else:
        monkeypatch.setattr(config, "MIN_DECODE_SPLIT_KEYS", 1 << 20)  # a GPU would split rows so few
    plain = attend(replace(case, batch=replace(case.batch, packs=None)))
    torch.testing.assert_close(attend(case), plain, rtol=0, atol=1e-5 if split else 0)
