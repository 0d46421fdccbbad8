"""Tests of decode rows built from slots, and of sampled tokens written back, by Triton and by the reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from support.interpreted import outside, rerun
from tok_kernels import Backend, SlotColumns
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.backends.triton import TritonBackend

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
            page_size=PAGE,
            scratch=len(pages) * PAGE,
        ),
    )


def on(device: torch.device, slots: SlotColumns) -> SlotColumns:
    names = ("last_token", "length", "ended", "eos_from_position", "page_table", "token_of", "end_ids")
    return replace(slots, **{name: getattr(slots, name).clone().to(device) for name in names})


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
