"""Tests of decode rows built from slots, sampled tokens written back, and slots filled for drafts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st

from support.interpreted import outside, rerun
from tok_kernels import Backend, DraftRows, SlotColumns
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.slots import triton as triton_slots

SLOTS, PAGES_EACH, PAGE = 9, 3, 4
ENDS = (5, 11)


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def columns(seed: int, device: torch.device) -> SlotColumns:
    """Return slots of random lengths on random pages, a third of them ended; the last slot is for padding."""
    source = torch.Generator().manual_seed(seed)

    def whole(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=source)

    ended = (whole(3, SLOTS + 1) == 0).int()
    ended[SLOTS] = 1
    pages = torch.randperm((SLOTS + 1) * PAGES_EACH, generator=source).int()
    return on(
        device,
        SlotColumns(
            last_token=whole(20, SLOTS + 1),
            length=whole(PAGES_EACH * PAGE, SLOTS + 1),
            ended=ended,
            eos_from_position=whole(PAGES_EACH * PAGE, SLOTS + 1),
            page_table=pages.view(SLOTS + 1, PAGES_EACH),
            token_of=torch.full((len(pages) * PAGE + 1,), -1),
            end_ids=torch.tensor(ENDS),
            seed=whole(1 << 40, SLOTS + 1),
            sample=whole(50, SLOTS + 1),
            temperature=torch.rand(SLOTS + 1, generator=source),
            page_size=PAGE,
            scratch=len(pages) * PAGE,
        ),
    )


def on(device: torch.device, slots: SlotColumns) -> SlotColumns:
    values = ((one.name, getattr(slots, one.name)) for one in fields(slots))
    tensors: dict[str, Any] = {name: x.clone().to(device) for name, x in values if isinstance(x, torch.Tensor)}
    return replace(slots, **tensors)


def copies(slots: SlotColumns, device: torch.device) -> list[tuple[Backend, SlotColumns]]:
    return [(ReferenceBackend(), on(torch.device("cpu"), slots)), (TritonBackend(), on(device, slots))]


@given(seed=st.integers(0, 2**20), rows=st.permutations(range(SLOTS)), padding=st.integers(0, 3))
def test_triton_decode_rows_and_sampled_tokens_equal_the_reference(
    device: torch.device, seed: int, rows: list[int], padding: int
) -> None:
    chosen = rows[: seed % (SLOTS + 1)] + [SLOTS] * padding
    results = []
    for backend, slots in copies(columns(seed, device), device):
        here = slots.length.device
        slot = torch.tensor(chosen, dtype=torch.int32, device=here)
        made = backend.decode_rows(slot, slots)
        token = (torch.arange(len(chosen), device=here) * 7 + seed) % 20
        logprob = -(torch.arange(len(chosen)) + 1.0).sqrt()  # on the CPU, so that all backends get the same bits
        drawn = backend.record_sampled_tokens(slot, token, logprob.to(here), slots)
        live = slots.scratch  # the scratch row may hold anything
        tensors = [made.token, made.position, made.kv_index, made.kv_len, drawn, slots.length]
        tensors += [made.next_position, made.seed, made.sample, made.temperature]
        tensors += [slots.ended, slots.token_of[:live], slots.last_token[:SLOTS]]
        results.append([x.cpu() for x in tensors])
    for expected, got in zip(*results, strict=True):
        assert expected.dtype == got.dtype
        assert torch.equal(expected, got)


def test_a_decode_row_appends_its_last_token_and_stops_at_an_eos_id(device: torch.device) -> None:
    for backend, slots in copies(columns(0, device), device):
        here = slots.length.device
        slots.ended[:2] = 0
        slots.length[:2] = torch.tensor([5, 3])
        slots.eos_from_position[:2] = torch.tensor([6, 5])
        slots.last_token[:2] = torch.tensor([17, 18])
        slot = torch.tensor([1, 0], dtype=torch.int32, device=here)
        made = backend.decode_rows(slot, slots)
        assert made.token.tolist() == [18, 17]
        assert made.position.tolist() == [3, 5]
        assert made.kv_len.tolist() == [4, 6]
        assert made.next_position.tolist() == [4, 6]
        pages = int(slots.page_table[1, 0]), int(slots.page_table[0, 1])
        assert made.kv_index.tolist() == [pages[0] * PAGE + 3, pages[1] * PAGE + 1]
        assert slots.token_of[made.kv_index].tolist() == [18, 17]
        token = torch.tensor([ENDS[1], ENDS[0]], device=here)
        drawn = backend.record_sampled_tokens(slot, token, torch.tensor([-0.5, -2.0], device=here), slots)
        assert drawn[0].tolist() == [ENDS[1], ENDS[0]]
        assert drawn[1].view(torch.float32).tolist() == [-0.5, -2.0]
        assert slots.ended[:2].tolist() == [1, 0]  # slot 1 may not end before position 5; its token is at 4
        again = backend.decode_rows(slot, slots)
        assert again.kv_len.tolist() == [4 + 1, 0]


def drafting(seed: int, device: torch.device) -> tuple[SlotColumns, list[torch.Tensor]]:
    """Return slots as `columns` does, and all columns by dtype; `last_token`, `length` and `ended` are rows of them."""
    slots, source = columns(seed, device), torch.Generator().manual_seed(seed)
    int64 = torch.randint(99, (5, SLOTS + 3), generator=source).to(device)
    int32 = torch.randint(99, (2, SLOTS + 3), generator=source).int().to(device)
    float32 = torch.rand((3, SLOTS + 3), generator=source).to(device)
    int64[1, : SLOTS + 1], int64[3, : SLOTS + 1] = slots.length, slots.last_token
    int32[1, : SLOTS + 1] = slots.ended
    whole = [one[:, : SLOTS + 1] for one in (int64, int32, float32)]  # padded, as those of an engine
    return replace(slots, length=whole[0][1], last_token=whole[0][3], ended=whole[1][1]), whole


@given(seed=st.integers(0, 2**20), order=st.permutations(range(SLOTS)), length=st.integers(1, 4))
def test_triton_fills_slots_for_drafts_as_the_reference_does(
    device: torch.device, seed: int, order: list[int], length: int
) -> None:
    sequences, generator = SLOTS // (1 + length), torch.Generator().manual_seed(seed)
    slot = torch.tensor(order[: sequences * (1 + length)]).view(1 + length, sequences).int()
    count = torch.randint(length + 1, (sequences,), generator=generator)
    slot[1:][torch.arange(length)[:, None] >= count] = -1
    draft_kn = torch.randint(-1, 20, (length, sequences), generator=generator)
    results = []
    for backend, here in ((ReferenceBackend(), torch.device("cpu")), (TritonBackend(), device)):
        slots, whole = drafting(seed, here)
        before = [one.clone().cpu() for one in (*whole, slots.page_table)]
        with patch.object(triton_slots, "_PAGE_BLOCK", 2):  # fewer pages than a slot has
            backend.set_draft_slots(DraftRows(*[slot.to(here)] * 3), draft_kn.to(here), whole, slots)
        int64, int32, float32, page_table = after = [one.cpu() for one in (*whole, slots.page_table)]
        results.append(after)
        untouched = [i for i in range(SLOTS + 1) if i not in slot[1:]]
        for one, was in zip(after[:3], before, strict=False):
            assert torch.equal(one[:, untouched], was[:, untouched])
        for i, sequence in (slot[1:] >= 0).nonzero().tolist():
            filled, source, token = int(slot[1 + i, sequence]), int(slot[0, sequence]), int(draft_kn[i, sequence])
            position = int(before[0][1, source]) + 1 + i
            assert int64[[1, 3], filled].tolist() == [position, max(token, 0)]
            assert bool(int32[1, filled]) == (token < 0 or bool(before[1][1, source]))
            assert torch.equal(float32[:, filled], before[2][:, source])
            pages = min(position // PAGE + 1, PAGES_EACH)
            assert torch.equal(page_table[filled, :pages], before[3][source, :pages])
            assert torch.equal(page_table[filled, pages:], before[3][filled, pages:])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)
