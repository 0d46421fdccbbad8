"""Draw: how the rows of a step that sample are described to the sampling kernel, and in which portions."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from tok_core.messages import StepInput
from tok_core.worker.state import WorkerState
from tok_kernels import Backend, Filters, LogitBias, Penalties, Sampled, SamplingBatch

CHUNK = 256  # rows drawn at once where any asks for filters or penalties, which take whole rows of scratch memory


def draw(backend: Backend, state: WorkerState, step: StepInput, logits_RV: Tensor, slot_R: Tensor) -> Sampled:
    """The tokens of the step's R rows."""
    rows = len(step.sample_slot)
    if rows <= CHUNK or not (len(step.filter_row) or len(step.penalty_row)):
        return backend.sample(logits_RV, _sampling_batch(state, step, slot_R, logits_RV.shape[1]))
    parts = []
    for first in range(0, rows, CHUNK):
        logits, slots = logits_RV[first : first + CHUNK], slot_R[first : first + CHUNK]
        chunk = _rows_of(step, first, first + CHUNK)
        parts.append(backend.sample(logits, _sampling_batch(state, chunk, slots, logits.shape[1])))
    return Sampled(
        token=torch.cat([part.token for part in parts]),
        logprob=torch.cat([part.logprob for part in parts]),
        top_token=torch.cat([part.top_token for part in parts]),
        top_logprob=torch.cat([part.top_logprob for part in parts]),
    )


def _rows_of(step: StepInput, first: int, last: int) -> StepInput:
    """The step as if only the rows from `first` to before `last` were drawn."""

    def within(rows: np.ndarray) -> np.ndarray:
        return rows[(rows >= first) & (rows < last)] - first

    return msgspec.structs.replace(
        step,
        filter_row=within(step.filter_row),
        penalty_row=within(step.penalty_row),
        bias_row=within(step.bias_row),
    )


def _sampling_batch(state: WorkerState, step: StepInput, slot_R: Tensor, vocab_size: int) -> SamplingBatch:
    """Extras only for the rows that ask for them."""
    return SamplingBatch(
        temperature=state.temperature[slot_R],
        seed=state.seed[slot_R],
        sample=state.sample[slot_R],
        position=state.length[slot_R],
        penalties=_penalties(state, step, slot_R, vocab_size),
        bias=_bias(state, step, slot_R),
        filters=_filters(state, step, slot_R),
        top_logprobs=step.top_logprobs,
        all_greedy=step.all_greedy,
    )


def _filters(state: WorkerState, step: StepInput, slot_R: Tensor) -> Filters | None:
    if not len(step.filter_row):
        return None
    rows = state.put(step.filter_row, torch.int64)
    slots = slot_R[rows]
    return Filters(rows, state.top_k[slots], state.top_p[slots], state.min_p[slots])


def _bias(state: WorkerState, step: StepInput, slot_R: Tensor) -> LogitBias | None:
    """Every entry of the asking rows; one that does not count adds 0 to token 0."""
    if not len(step.bias_row):
        return None
    rows = state.put(step.bias_row, torch.int64)
    slots = slot_R[rows]
    active = state.bias_until[slots] > state.length[slots].unsqueeze(1)
    token = torch.where(active, state.bias_token[slots], 0)
    value = torch.where(active, state.bias_value[slots], 0.0)
    return LogitBias(rows.repeat_interleave(token.shape[1]), token.flatten(), value.flatten())


def _penalties(state: WorkerState, step: StepInput, slot_R: Tensor, vocab_size: int) -> Penalties | None:
    """Counts the tokens of the asking rows, read from the pages that hold them."""
    if not len(step.penalty_row):
        return None
    rows = state.put(step.penalty_row, torch.int64)
    slots = slot_R[rows]
    position = torch.arange(step.max_kv, device=state.device)
    page = state.page_table[slots][:, position // state.page_size].long()
    token = state.token_of[page * state.page_size + position % state.page_size]
    generated = position >= state.prompt_len[slots].unsqueeze(1)
    present = position < state.length[slots].unsqueeze(1)
    zeros = torch.zeros((len(rows), vocab_size), dtype=torch.int32, device=state.device)
    in_output = zeros.scatter_add(1, token, (generated & present).int())
    in_prompt = zeros.scatter_add(1, token, (~generated & present).int()) > 0
    return Penalties(rows, in_prompt, in_output, state.presence[slots], state.frequency[slots], state.repetition[slots])
