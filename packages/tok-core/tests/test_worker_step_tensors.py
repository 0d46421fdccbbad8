"""Step tensors hold the prefix groups of a step, padded for its CUDA graph; page copies are simultaneous."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.tiny_models import make_model
from tok_core.messages import SlotMoves, VerifyRows
from tok_core.model_config.model_config import read_config
from tok_core.worker import state as state_module
from tok_core.worker import step_tensors
from tok_core.worker.cuda_graphs import GraphKey, padded_arrays
from tok_core.worker.startup.dummy_steps import dummy_step
from tok_core.worker.state import WorkerState

CPU = torch.device("cpu")


def test_kv_start_of_a_row_is_the_end_of_its_innermost_group() -> None:
    step = dummy_step(decode=6, groups=2, prefix=96, levels=3)
    inner = step.levels[2]
    inner.count[1] = 2  # the last row is in the outer groups alone
    assert step_tensors.decode_kv_start(step).tolist() == [96, 96, 96, 96, 96, 64]
    assert step_tensors.decode_kv_start(dummy_step(decode=3)).tolist() == [0, 0, 0]


def test_step_levels_become_cascade_levels_with_group_bounds() -> None:
    step = dummy_step(decode=7, groups=3, prefix=64, levels=2)
    staged = {name: torch.from_numpy(array) for name, array in step_tensors.step_arrays(step).items()}
    outer, inner = step_tensors._cascade_levels(step, staged)
    assert (outer.max_rows, outer.max_kv, inner.max_rows, inner.max_kv) == (7, 32, 3, 32)
    assert outer.kv_end.tolist() == [32]
    assert inner.row_start.tolist() == inner.slot.tolist() == [0, 2, 4]
    assert inner.row_count.tolist() == [2, 2, 3]
    assert inner.kv_start.tolist() == [32] * 3
    assert staged["kv_start"].tolist() == [64] * 7


def test_step_arrays_are_padded_to_the_shapes_of_their_cuda_graph() -> None:
    key = GraphKey(16, groups=True, long=True)
    recorded = padded_arrays(None, key, padding_slot=99)
    for step in (dummy_step(decode=10, groups=3, prefix=32), dummy_step(decode=16, groups=8, prefix=32)):
        filled = padded_arrays(step, key, padding_slot=99)
        assert [(name, array.shape, array.dtype) for name, array in filled.items()] == [
            (name, array.shape, array.dtype) for name, array in recorded.items()
        ]
        groups = len(step.levels[0].start)
        assert filled["count_0"].tolist() == [*step.levels[0].count, *[0] * (8 - groups)]
        assert filled["slots"][len(step.decode_slot) :].tolist() == [99] * (16 - len(step.decode_slot))
    assert not any(
        name.startswith("start_") for name in padded_arrays(None, key._replace(groups=False), padding_slot=99)
    )
    assert np.unique(recorded["slots"]).tolist() == [99]


@given(
    drafts=st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(any),
    longest=st.integers(7, 9),
    padding=st.integers(0, 3),
    max_pack_rows=st.sampled_from([2, 3, 4, 8]),
    seed=st.integers(0, 99),
)
def test_every_row_is_in_one_pack_with_rows_of_its_sequence(
    drafts: list[int], longest: int, padding: int, max_pack_rows: int, seed: int
) -> None:
    """Sequence i has `drafts[i]` draft rows; those without are not among the step's `verify_rows`."""
    order = np.random.default_rng(seed).permutation(sum(drafts) + len(drafts))
    step = dummy_step(decode=len(order))
    step.decode_slot = order.astype(np.int32)
    parent, lent, sequence_of, slot = [], [], np.zeros(len(order), np.int64), len(drafts)
    for sequence, count in enumerate(drafts):
        rows = range(slot, slot + count)
        sequence_of[[sequence, *rows]] = sequence
        slot += count
        if count:
            parent.append(sequence)
            lent.append([*rows, *[-1] * (longest - count)])
    lents = np.array(lent, np.int32).reshape(len(parent), longest)
    step.verify_rows = VerifyRows(np.array(parent, np.int32), lents, np.full_like(lents, -1))
    total = len(order) + padding
    packs = step_tensors.pack_arrays(step, total, max_pack_rows)["packs"]
    assert packs.shape == (total, max_pack_rows)
    assert packs.dtype == np.int32
    assert sorted(packs[packs >= 0]) == list(range(total))
    used = [pack[pack >= 0] for pack in packs if pack[0] >= 0]
    assert len(used) == sum(-(-(1 + count) // max_pack_rows) for count in drafts) + padding
    assert (packs[len(used) :] == -1).all()
    for pack in used:
        assert len(pack) == 1 or len({sequence_of[order[row]] for row in pack}) == 1
    # Drafts of a draft model come as moved slots; a sequence past accepted drafts moves, too.
    slot = np.concatenate((np.arange(len(drafts)), lents[lents >= 0]))
    source = sequence_of[slot]
    step.verify_rows, step.moves = None, SlotMoves(slot, source, np.ones_like(slot), np.ones_like(slot))
    assert np.array_equal(step_tensors.pack_arrays(step, total, max_pack_rows)["packs"], packs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("together", [1, 3, 1000])
def test_page_copies_read_the_old_contents_in_any_chunk_size(
    dtype: torch.dtype, together: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Page 0 is copied and then overwritten by page 1; pages 2 and 3 change places."""
    config = read_config(make_model("llama", tmp_path / "tiny"))
    state = WorkerState(config, CPU, dtype, slots=1, num_pages=8, page_size=4, pages_per_slot=2)
    state.kv.view(torch.uint8).random_(0, 120)
    state.columns.token_of.random_(0, 99)
    pages = state.kv.view(torch.uint8).clone(), state.columns.token_of.view(-1, 4).clone()
    source, target = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 0, 3, 2])
    monkeypatch.setattr(state_module, "MAX_COPY_BYTES", together * 4 * state.kv[0, :, 0, 0].nbytes)
    state._copy_pages(source, target)
    where = torch.arange(9)
    where[target] = source
    assert torch.equal(state.kv.view(torch.uint8), pages[0][:, :, where])
    assert torch.equal(state.columns.token_of.view(-1, 4), pages[1][where])
