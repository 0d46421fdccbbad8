"""Build the inputs of a step's forward pass: host arrays from the StepInput, then tensors from them and the state.

`step_arrays` runs on the host, before the arrays are staged. `build_step_tensors` enqueues operations on the device.
Of these, steps that replay a CUDA graph need `decode_kv_start`, `group_arrays` and `pack_arrays` only.

Legend: D decode rows, P prefill chunks, B = D + P sequences, T tokens, R rows that sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tok_core.messages import GroupLevel, Int64, StepInput
from tok_core.worker.state import WorkerState
from tok_kernels import AttentionBatch, Backend, CascadeLevel, HostLengths, HostLevel


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of a step's forward pass, on the device.

    token_T      tokens to feed, int64
    position_T   their positions, int64
    kv_index_T   rows of the KV cache that they write, int64
    batch        attention inputs
    logit_row_R  rows that get logits, int64; None: all rows, in order
    """

    token_T: Tensor
    position_T: Tensor
    kv_index_T: Tensor
    batch: AttentionBatch
    logit_row_R: Tensor | None


def step_arrays(step: StepInput, max_pack_rows: int = 1) -> dict[str, np.ndarray]:
    """Return the host arrays that `build_step_tensors` needs, by name; packs have up to `max_pack_rows` rows."""
    decode, count = len(step.decode_slot), step.prefill_count
    q_start = np.concatenate(([0], np.cumsum(np.concatenate((np.ones(decode, np.int32), count))))).astype(np.int32)
    arrays = {
        "slots": np.concatenate((step.decode_slot, step.prefill_slot)),
        "kv_start": np.concatenate((decode_kv_start(step), np.zeros(len(count), np.int32))),
        "q_start": q_start,
    }
    if len(count):
        arrays |= {
            "prefill_end": step.prefill_start + count,
            "prefill_token": step.prefill_token,
            "prefill_position": concatenated_ranges(step.prefill_start, count).astype(np.int32),
            "prefill_slot_T": np.repeat(step.prefill_slot, count),
            "logit_row": q_start[1:][step.sample_row] - 1,
        }
    for number, level in enumerate(step.levels):
        arrays |= group_arrays(number, level, len(level.start))
    has_packs = max_pack_rows > 1 and has_draft_rows(step)
    return arrays | pack_arrays(step, decode, max_pack_rows) if has_packs else arrays


def has_draft_rows(step: StepInput) -> bool:
    """Return whether any decode row of the step verifies a draft."""
    moves = step.moves
    return step.verify_rows is not None or (moves is not None and bool((moves.slot != moves.source).any()))


def draft_slots(step: StepInput) -> NDArray[np.int32]:
    """Return each sequence's slot, then the slots of the rows that verify its drafts: int32 `[n, 1 + k]`; −1: none.

    The step has draft rows.
    """
    if step.verify_rows is not None:
        return np.concatenate((step.verify_rows.parent[:, None], step.verify_rows.lent), axis=1)
    assert step.moves is not None
    is_draft = step.moves.slot != step.moves.source
    slot, source = step.moves.slot[is_draft], step.moves.source[is_draft]
    parent, sequence, drafts = np.unique(source, return_inverse=True, return_counts=True)
    slots = np.full((len(parent), 1 + drafts.max()), -1, np.int32)
    slots[:, 0] = parent
    order = np.argsort(sequence, kind="stable")
    slots[sequence[order], 1 + concatenated_ranges(np.zeros_like(drafts), drafts)] = slot[order]
    return slots


def decode_row_of(step: StepInput) -> NDArray[np.int32]:
    """Return the decode row of each slot, and −1 for slots without one and for slot −1."""
    row_of = np.full(int(step.decode_slot.max(initial=0)) + 2, -1, np.int32)
    row_of[step.decode_slot] = np.arange(len(step.decode_slot))
    return row_of


def pack_arrays(step: StepInput | None, rows: int, max_pack_rows: int) -> dict[str, np.ndarray]:
    """Return `AttentionBatch.packs` of `rows` decode rows, `[rows, max_pack_rows]`.

    A sequence and the rows that verify its drafts make up packs. Any other row is a pack of its own, and so are padding
    rows; step None: padding only.
    """
    packs = np.full((rows, max_pack_rows), -1, np.int32)
    if step is None:
        packs[:, 0] = np.arange(rows)
        return {"packs": packs}
    row = decode_row_of(step)[draft_slots(step)]
    packs_each = -(-row.shape[1] // max_pack_rows)
    together = np.full((len(row), packs_each * max_pack_rows), -1, np.int32)
    together[:, : row.shape[1]] = row
    together = together.reshape(-1, max_pack_rows)
    together = together[together[:, 0] >= 0]
    is_alone = np.ones(rows + 1, np.bool_)  # the last entry stands for the −1 of unused entries
    is_alone[together] = False
    alone = is_alone[:rows].nonzero()[0]
    packs[: len(together)] = together
    packs[len(together) : len(together) + len(alone), 0] = alone
    return {"packs": packs}


def group_arrays(number: int, level: GroupLevel | None, size: int) -> dict[str, np.ndarray]:
    """Return the prefix groups of cascade level `number`, padded to `size` by groups without rows; None: padding only.

    The arrays have the names of GroupLevel's fields and the level's number, such as "kv_end_0".
    """

    def padded(name: str) -> np.ndarray:
        values = np.zeros(0, np.int32) if level is None else getattr(level, name)
        return np.concatenate((values, np.zeros(size - len(values), np.int32))) if len(values) < size else values

    return {f"{name}_{number}": padded(name) for name in GroupLevel.__struct_fields__}


def decode_kv_start(step: StepInput) -> np.ndarray:
    """Return the first position that each decode row reads for itself, int32 `[D]`.

    It is the end of the row's innermost prefix group; 0 without a group.
    """
    kv_start = np.zeros(len(step.decode_slot), np.int32)
    for level in step.levels:
        kv_start[concatenated_ranges(level.start, level.count)] = np.repeat(level.kv_end, level.count)
    return kv_start


def concatenated_ranges(start: np.ndarray, count: np.ndarray) -> Int64:
    """Concatenate the ranges `start[i], …, start[i] + count[i] − 1`: `[5, 9], [2, 3] -> [5, 6, 9, 10, 11]`."""
    before = np.cumsum(count, dtype=np.int64) - count
    ranges: Int64 = np.repeat(start - before, count) + np.arange(count.sum())
    return ranges


def cascade_level(staged: Mapping[str, Tensor], number: int, max_rows: int, max_kv: int) -> CascadeLevel:
    """Return cascade level `number`; `staged` has its `group_arrays` on the device.

    max_rows, max_kv  upper bounds of any group's rows and positions
    """
    start, count, slot, kv_start, kv_end = (staged[f"{name}_{number}"] for name in GroupLevel.__struct_fields__)
    return CascadeLevel(start, count, slot, kv_start, kv_end, max_rows=max_rows, max_kv=max_kv)


def _cascade_levels(step: StepInput, staged: Mapping[str, Tensor]) -> tuple[CascadeLevel, ...]:
    return tuple(
        cascade_level(staged, number, int(level.count.max()), int((level.kv_end - level.kv_start).max()))
        for number, level in enumerate(step.levels)
    )


class HostLengthTracker:
    """Lengths of sequences as the host can compute them, for backends whose attention kernels are planned on the host.

    The host does not know that a sequence has ended on the device: its slot's length keeps growing here until the slot
    gets a new sequence. Nor does it know which drafts the device has accepted; then only prompts are planned here.
    """

    def __init__(self, slots: int) -> None:
        self._length = np.zeros(slots, np.int32)

    def reset(self) -> None:
        """Set all lengths to 0."""
        self._length.fill(0)

    def advance(self, step: StepInput) -> NDArray[np.int32]:
        """Advance the lengths by a step; return `kv_len` of its sequences, int32 `[B]`. Call this for every step."""
        if step.new is not None:
            self._length[step.new.slot] = step.new.length
        if step.moves is not None:
            self._length[step.moves.slot] = step.moves.length
        self._length[step.decode_slot] += 1
        self._length[step.prefill_slot] = step.prefill_start + step.prefill_count
        return np.concatenate((self._length[step.decode_slot], self._length[step.prefill_slot]))


def _host_lengths(step: StepInput, kv_len: NDArray[np.int32]) -> HostLengths:
    levels = tuple(HostLevel(level.start, level.count, level.kv_start, level.kv_end) for level in step.levels)
    decode, count = np.ones(len(step.decode_slot), np.int32), step.prefill_count
    kv_start = np.concatenate((decode_kv_start(step), np.zeros(len(count), np.int32)))
    return HostLengths(np.concatenate((decode, count)), kv_len, kv_start, levels)


def build_step_tensors(
    backend: Backend,
    state: WorkerState,
    step: StepInput,
    staged: Mapping[str, Tensor],
    host_kv_len: NDArray[np.int32] | None,
) -> StepTensors:
    """Build the step's tensors, and advance the lengths and tokens of its slots in `state`.

    staged       `step_arrays` on the device
    host_kv_len  `kv_len` of HostLengthTracker; None: the backend plans nothing on the host
    """
    columns, decode = state.columns, len(step.decode_slot)
    inputs = backend.decode_rows(staged["slots"][:decode], columns)
    token_T, position_T, kv_index_T, kv_len_B = inputs.token, inputs.position, inputs.kv_index, inputs.kv_len
    if len(step.prefill_slot):
        slot, end = staged["slots"][decode:].long(), staged["prefill_end"]
        token, position = staged["prefill_token"].long(), staged["prefill_position"].long()
        kv_index = state.kv_index(staged["prefill_slot_T"], position)
        columns.token_of[kv_index] = token
        columns.length[slot] = end.long()
        token_T, position_T = torch.cat((token_T, token)), torch.cat((position_T, position))
        kv_index_T, kv_len_B = torch.cat((kv_index_T, kv_index)), torch.cat((kv_len_B, end))
    batch = AttentionBatch(
        page_table=columns.page_table,
        slots=staged["slots"],
        q_start=staged["q_start"],
        kv_len=kv_len_B,
        kv_start=staged["kv_start"],
        num_decode=decode,
        max_q=max(1, int(step.prefill_count.max(initial=0))),
        max_kv=step.max_kv,
        levels=_cascade_levels(step, staged),
        host=None if host_kv_len is None else _host_lengths(step, host_kv_len),
        packs=staged.get("packs"),
    )
    # Without prefill chunks every row samples, in order.
    logit_row_R = staged["logit_row"].long() if "logit_row" in staged else None
    return StepTensors(token_T, position_T, kv_index_T, batch, logit_row_R)


def pass_lengths(state: WorkerState, step: StepInput, staged: Mapping[str, Tensor], position_T: Tensor) -> Tensor:
    """Return the length of the forward pass in which transformers computes each token, int64 `[T]`.

    RoPE of some models depends on it. A prompt is one pass, and each generated token is another.
    """
    slot_T = torch.cat((staged["slots"][: len(step.decode_slot)], staged["prefill_slot_T"])).long()
    return torch.maximum(state.prompt_len[slot_T], position_T + 1)
