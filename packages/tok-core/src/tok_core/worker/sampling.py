"""Describe the sampled rows of a step to the sampling kernel, in chunks that bound its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tok_core.messages import StepInput
from tok_core.parallel import VocabularyShards
from tok_core.sampling_params import DEVICE_COLUMNS, Stage
from tok_core.worker.state import WorkerState
from tok_kernels import Backend, Contexts, Filters, LogitBias, Masks, Penalties, Sampled, SamplingBatch

MAX_GATHERED_ROWS = 256  # rows sampled at once if ranks gather logits of the whole vocabulary; bounds their memory

_OPTION_ROWS = ("filter_row", "penalty_row", "bias_row", "mask_row", "top_row")


def sampling_arrays(step: StepInput) -> dict[str, np.ndarray]:
    """Return the host arrays that `sample_tokens` needs, by name."""
    arrays = {"sample_slot": step.sample_slot}
    if len(step.mask_row):
        arrays |= {"mask_of": step.mask_of, "mask": step.mask}
    if len(step.penalty_row):
        # A fork's last page is copied after the step, so the context is read from the slot that computed the row.
        computing = np.concatenate((step.decode_slot, step.prefill_slot))
        arrays["context_slot"] = computing[step.sample_row[step.penalty_row]]
    return arrays | {name: getattr(step, name) for name in _OPTION_ROWS if len(getattr(step, name))}


def sampling_batch(state: WorkerState, slot_R: Tensor) -> SamplingBatch:
    """Return the parameters that every sampled row has; callers add those of single rows with `replace`."""
    seed, sample, position = state.random_keys.index_select(1, slot_R)
    return SamplingBatch(
        temperature=state.sampling["temperature"].index_select(0, slot_R),
        seed=seed,
        sample=sample,
        position=position,
        processed=state.processed_logprobs,
    )


def sample_tokens(
    backend: Backend,
    state: WorkerState,
    step: StepInput,
    put: Mapping[str, Tensor],
    logits_RV: Tensor,
    shards: VocabularyShards | None = None,
) -> Sampled:
    """Sample the tokens of the step's R rows.

    put     the arrays of `sampling_arrays(step)` on the device
    shards  the part of the vocabulary that the logits cover; None: all of it

    If any row of a chunk has parameters that need the whole vocabulary, all ranks gather the chunk's logits. Logits of
    masked rows change in place.
    """
    slot_R, rows = put["sample_slot"].long(), len(step.sample_slot)
    whole = shards is not None and any(len(getattr(step, name)) for name in _OPTION_ROWS)
    size = MAX_GATHERED_ROWS if whole else max(rows, 1)
    parts = [
        _sample_rows(backend, state, step, put, logits_RV, shards, slot_R, slice(i, i + size))
        for i in range(0, max(rows, 1), size)
    ]
    if len(parts) == 1:
        return parts[0]
    return Sampled(
        token=torch.cat([part.token for part in parts]),
        logprob=torch.cat([part.logprob for part in parts]),
        top_token=torch.cat([part.top_token for part in parts]),
        top_logprob=torch.cat([part.top_logprob for part in parts]),
    )


def _sample_rows(
    backend: Backend,
    state: WorkerState,
    step: StepInput,
    put: Mapping[str, Tensor],
    logits_RV: Tensor,
    shards: VocabularyShards | None,
    slot_R: Tensor,
    chunk: slice,
) -> Sampled:
    """Sample the tokens of one chunk; filters, penalties, biases, masks, top tokens only for rows that request them."""
    logits, slots = logits_RV[chunk], slot_R[chunk]
    option_rows = {name: _within(getattr(step, name), put[name], chunk) for name in _OPTION_ROWS if name in put}
    gathering = shards if step.top_logprobs or any(rows is not None for rows in option_rows.values()) else None
    if gathering is not None:
        logits, shards = gathering.whole(logits), None
    batch = replace(
        sampling_batch(state, slots),
        penalties=_penalties(state, step, put, option_rows.get("penalty_row"), slots, chunk),
        bias=_bias(state, option_rows.get("bias_row"), slots),
        filters=_filters(state, option_rows.get("filter_row"), slots),
        top_logprobs=step.top_logprobs,
        all_greedy=step.all_greedy,
        shards=shards,
        masks=_masks(step, put, option_rows.get("mask_row"), chunk),
        top_rows=_top_rows(option_rows.get("top_row"), slots) if step.top_logprobs else None,
    )
    sampled = backend.sample(logits, batch)
    if gathering is None:
        return sampled
    # All ranks have sampled from whole rows, but their sums may differ in the last bit: use rank 0's tokens.
    return replace(sampled, token=gathering.gather(sampled.token)[0])


def _masks(step: StepInput, put: Mapping[str, Tensor], rows: Tensor | None, chunk: slice) -> Masks | None:
    if rows is None:
        return None
    first = int(np.searchsorted(step.mask_row, chunk.start))
    return Masks(rows, put["mask_of"][first : first + len(rows)].long(), put["mask"])


def _top_rows(rows: Tensor | None, slot_R: Tensor) -> Tensor:
    return slot_R[:0] if rows is None else rows


def _within(rows: np.ndarray, put: Tensor, chunk: slice) -> Tensor | None:
    """Return which of the ascending rows lie in the chunk, relative to its start, int64; None: none of them."""
    first, last = np.searchsorted(rows, (chunk.start, chunk.stop))
    return put[first:last].long() - chunk.start if first < last else None


def _filters(state: WorkerState, rows: Tensor | None, slot_R: Tensor) -> Filters | None:
    if rows is None:
        return None
    return Filters(rows, **_stage(state, "filter", slot_R[rows]))


def _stage(state: WorkerState, stage: Stage, slot_r: Tensor) -> dict[str, Tensor]:
    """Return the columns of one stage's parameters, by name."""
    return {name: state.sampling[name][slot_r] for name, column in DEVICE_COLUMNS.items() if column.stage == stage}


def _bias(state: WorkerState, rows: Tensor | None, slot_R: Tensor) -> LogitBias | None:
    """Return all bias entries of `rows`; an inactive entry adds 0 to token 0."""
    if rows is None:
        return None
    slots = slot_R[rows]
    active = state.bias_until[slots] > state.columns.length[slots].unsqueeze(1)
    prefix = state.bias_prefix[slots]
    if prefix.numel():
        generated = state.generated_before(slots, prefix.shape[2]).unsqueeze(1)
        active[:, : prefix.shape[1]] &= ((prefix == generated) | (prefix < 0)).all(-1)
    token = torch.where(active, state.bias_token[slots], 0)
    value = torch.where(active, state.bias_value[slots], 0.0)
    return LogitBias(rows.repeat_interleave(token.shape[1]), token.flatten(), value.flatten())


def _penalties(
    state: WorkerState, step: StepInput, put: Mapping[str, Tensor], rows: Tensor | None, slot_R: Tensor, chunk: slice
) -> Penalties | None:
    if rows is None:
        return None
    first = int(np.searchsorted(step.penalty_row, chunk.start))
    slots, columns = slot_R[rows], state.columns
    contexts = Contexts(
        page_table=columns.page_table,
        token_of=columns.token_of,
        page_size=state.page_size,
        slots=put["context_slot"][first : first + len(rows)].long(),
        length=columns.length[slots],
        prompt_len=state.prompt_len[slots],
        max_len=step.max_kv,
    )
    return Penalties(rows, contexts, **_stage(state, "penalty", slots))
