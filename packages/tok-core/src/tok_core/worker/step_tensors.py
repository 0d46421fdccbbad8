"""Build the tensors of a step from its host arrays and the state on the device.

Legend: D decode rows, P prefill chunks, B = D + P sequences, T tokens, R rows that sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tok_core.messages import GroupLevel, StepInput
from tok_core.worker.state import WorkerState
from tok_kernels import AttentionBatch, Backend, CascadeLevel, HostLengths, HostLevel


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of one step as tensors on the device.

    token_T, position_T, kv_index_T   tokens, their positions and cache rows, int64
    batch                             attention inputs
    logit_row_R                       rows that get logits, int64; None: all
    """

    token_T: Tensor
    position_T: Tensor
    kv_index_T: Tensor
    batch: AttentionBatch
    logit_row_R: Tensor | None


def arrays(step: StepInput) -> dict[str, np.ndarray]:
    """Return the host arrays that `rows` needs, by name."""
    decode, count = len(step.decode_slot), step.prefill_count
    q_start = np.concatenate(([0], np.cumsum(np.concatenate((np.ones(decode, np.int32), count))))).astype(np.int32)
    needed = {
        "slots": np.concatenate((step.decode_slot, step.prefill_slot)),
        "kv_start": np.concatenate((own_start(step), np.zeros(len(count), np.int32))),
        "q_start": q_start,
    }
    if len(count):
        needed |= {
            "prefill_end": step.prefill_start + count,
            "prefill_token": step.prefill_token,
            "prefill_position": _positions(step),
            "prefill_slot_T": np.repeat(step.prefill_slot, count),
            "logit_row": q_start[1:][step.sample_row] - 1,
        }
    for number, level in enumerate(step.levels):
        needed |= groups(number, level, len(level.start))
    return needed


def groups(number: int, level: GroupLevel | None, size: int) -> dict[str, np.ndarray]:
    """Return the prefix groups of level `number`, padded to `size` entries by groups without rows."""

    def padded(name: str) -> np.ndarray:
        values = np.zeros(0, np.int32) if level is None else getattr(level, name)
        return np.concatenate((values, np.zeros(size - len(values), np.int32))) if len(values) < size else values

    return {f"{name}_{number}": padded(name) for name in GroupLevel.__struct_fields__}


def own_start(step: StepInput) -> np.ndarray:
    """Return where each decode row's own KV begins, int32 `[D]`: at the end of its innermost prefix group, or at 0."""
    own = np.zeros(len(step.decode_slot), np.int32)
    for level in step.levels:
        first = np.cumsum(level.count) - level.count
        member = np.arange(level.count.sum()) + np.repeat(level.start - first, level.count)
        own[member] = np.repeat(level.kv_end, level.count)
    return own


def cascade_level(put: Mapping[str, Tensor], number: int, max_rows: int, max_kv: int) -> CascadeLevel:
    """Return the cascade level of the groups of level `number` in `put`."""
    start, count, slot, kv_start, kv_end = (put[f"{name}_{number}"] for name in GroupLevel.__struct_fields__)
    return CascadeLevel(start, count, slot, kv_start, kv_end, max_rows=max_rows, max_kv=max_kv)


def _cascade(step: StepInput, put: Mapping[str, Tensor]) -> tuple[CascadeLevel, ...]:
    return tuple(
        cascade_level(put, i, int(level.count.max()), int((level.kv_end - level.kv_start).max()))
        for i, level in enumerate(step.levels)
    )


class HostLengthTracker:
    """Lengths of slots as the host can compute them, for backends that plan on the host.

    A slot that has ended on the device keeps growing here until it gets a new sequence.
    """

    def __init__(self, slots: int) -> None:
        self._length = np.zeros(slots, np.int32)

    def reset(self) -> None:
        """Set all lengths to 0."""
        self._length.fill(0)

    def follow(self, step: StepInput) -> NDArray[np.int32]:
        """Advance the lengths, and return `kv_len` of the step's sequences, int32 `[B]`. Call this for every step."""
        if step.new is not None:
            self._length[step.new.slot] = step.new.length
        if step.moves is not None:
            self._length[step.moves.slot] = step.moves.length
        self._length[step.decode_slot] += 1
        self._length[step.prefill_slot] = step.prefill_start + step.prefill_count
        return np.concatenate((self._length[step.decode_slot], self._length[step.prefill_slot]))


def host_lengths(step: StepInput, kv_len: NDArray[np.int32]) -> HostLengths:
    """Return the lengths of the step's sequences as the host knows them."""
    levels = tuple(HostLevel(level.start, level.count, level.kv_start, level.kv_end) for level in step.levels)
    decode, count = np.ones(len(step.decode_slot), np.int32), step.prefill_count
    kv_start = np.concatenate((own_start(step), np.zeros(len(count), np.int32)))
    return HostLengths(np.concatenate((decode, count)), kv_len, kv_start, levels)


def rows(
    backend: Backend,
    state: WorkerState,
    step: StepInput,
    put: Mapping[str, Tensor],
    host_kv_len: NDArray[np.int32] | None = None,
) -> StepTensors:
    """Build the step's tensors; advance its slots' lengths and tokens. `host_kv_len`: for backends that plan."""
    columns, decode = state.columns, len(step.decode_slot)
    inputs = backend.decode_rows(put["slots"][:decode], columns)
    token_T, position_T, kv_index_T, kv_len_B = inputs.token, inputs.position, inputs.kv_index, inputs.kv_len
    if len(step.prefill_slot):
        slot, end = put["slots"][decode:].long(), put["prefill_end"]
        token, position = put["prefill_token"].long(), put["prefill_position"].long()
        page = columns.page_table[put["prefill_slot_T"].long(), position // state.page_size].long()
        kv_index = page * state.page_size + position % state.page_size
        columns.token_of[kv_index] = token
        columns.length[slot] = end.long()
        token_T, position_T = torch.cat((token_T, token)), torch.cat((position_T, position))
        kv_index_T, kv_len_B = torch.cat((kv_index_T, kv_index)), torch.cat((kv_len_B, end))
    batch = AttentionBatch(
        page_table=columns.page_table,
        slots=put["slots"],
        q_start=put["q_start"],
        kv_len=kv_len_B,
        kv_start=put["kv_start"],
        num_decode=decode,
        max_q=max(1, int(step.prefill_count.max(initial=0))),
        max_kv=step.max_kv,
        levels=_cascade(step, put),
        host=None if host_kv_len is None else host_lengths(step, host_kv_len),
    )
    # Without prefill chunks every row samples, in order.
    return StepTensors(token_T, position_T, kv_index_T, batch, put["logit_row"].long() if "logit_row" in put else None)


def pass_lengths(state: WorkerState, step: StepInput, put: Mapping[str, Tensor], position_T: Tensor) -> Tensor:
    """Return the length of each token's forward pass in transformers, int64 `[T]`; a prompt is one pass."""
    slot_T = torch.cat((put["slots"][: len(step.decode_slot)], put["prefill_slot_T"])).long()
    return torch.maximum(state.prompt_len[slot_T], position_T + 1)


def _positions(step: StepInput) -> np.ndarray:
    """Return the positions of the prefill tokens, int32: each chunk counts up from its start."""
    count = step.prefill_count.astype(np.int64)
    first = np.repeat(step.prefill_start - (np.cumsum(count) - count), count)
    return (first + np.arange(count.sum())).astype(np.int32)
