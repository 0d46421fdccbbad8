"""Sample a step's tokens from its logits: gather each row's sampling parameters, and call the backend.

`sampling_arrays` runs on the host, before the step's arrays are staged. `sample_tokens` runs on the last pipeline stage
in steps that do not sample within a CUDA graph.

Legend: R rows that sample, V vocabulary. An option is a sampling parameter that only some rows have: filters,
penalties, biases, masks, top log-probabilities. The step lists the rows of each option in ascending order.
"""

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
        computing_slot = np.concatenate((step.decode_slot, step.prefill_slot))
        arrays["context_slot"] = computing_slot[step.sample_row[step.penalty_row]]
    return arrays | {name: getattr(step, name) for name in _OPTION_ROWS if len(getattr(step, name))}


def sampling_batch(state: WorkerState, slot_R: Tensor) -> SamplingBatch:
    """Return the parameters that every row has, for rows that sample for slots `slot_R`; callers add options."""
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
    staged: Mapping[str, Tensor],
    logits_RV: Tensor,
    shards: VocabularyShards | None = None,
) -> Sampled:
    """Sample the tokens of the step's R rows.

    staged  `sampling_arrays(step)` on the device
    shards  the part of the vocabulary that the logits cover; None: all of it

    Options need logits of the whole vocabulary. If the vocabulary is sharded and any row has an option, rows are
    sampled in blocks of MAX_GATHERED_ROWS, and all ranks gather the logits of blocks with options. Logits of masked
    rows change in place.
    """
    slot_R, rows = staged["sample_slot"].long(), len(step.sample_slot)
    gathers = shards is not None and any(len(getattr(step, name)) for name in _OPTION_ROWS)
    size = MAX_GATHERED_ROWS if gathers else max(rows, 1)
    blocks = [
        _sample_block(backend, state, step, staged, logits_RV, shards, slot_R, slice(start, start + size))
        for start in range(0, max(rows, 1), size)
    ]
    if len(blocks) == 1:
        return blocks[0]
    return Sampled(
        token=torch.cat([block.token for block in blocks]),
        logprob=torch.cat([block.logprob for block in blocks]),
        top_token=torch.cat([block.top_token for block in blocks]),
        top_logprob=torch.cat([block.top_logprob for block in blocks]),
    )


def _sample_block(
    backend: Backend,
    state: WorkerState,
    step: StepInput,
    staged: Mapping[str, Tensor],
    logits_RV: Tensor,
    shards: VocabularyShards | None,
    slot_R: Tensor,
    block: slice,
) -> Sampled:
    """Sample the tokens of a block of rows, with each option for those of its rows that have it."""
    logits, slots = logits_RV[block], slot_R[block]
    option_rows = {
        name: _rows_in_block(getattr(step, name), staged[name], block) for name in _OPTION_ROWS if name in staged
    }
    gathering = shards if step.top_logprobs or any(rows is not None for rows in option_rows.values()) else None
    if gathering is not None:
        logits, shards = gathering.whole(logits), None
    batch = replace(
        sampling_batch(state, slots),
        penalties=_penalties(state, step, staged, option_rows.get("penalty_row"), slots, block),
        bias=_bias(state, option_rows.get("bias_row"), slots),
        filters=_filters(state, option_rows.get("filter_row"), slots),
        top_logprobs=step.top_logprobs,
        all_greedy=step.all_greedy,
        shards=shards,
        masks=_masks(step, staged, option_rows.get("mask_row"), block),
        top_rows=_top_rows(option_rows.get("top_row"), slots) if step.top_logprobs else None,
    )
    sampled = backend.sample(logits, batch)
    if gathering is None:
        return sampled
    # Each rank has sampled from whole rows, but sums may differ between ranks in the last bit: use rank 0's tokens.
    return replace(sampled, token=gathering.gather(sampled.token)[0])


def _rows_in_block(host_rows: np.ndarray, rows: Tensor, block: slice) -> Tensor | None:
    """Return which of an option's rows lie in the block, relative to its start, int64; None: no row does.

    `host_rows` are the same ascending rows on the host.
    """
    first, last = np.searchsorted(host_rows, (block.start, block.stop))
    return rows[first:last].long() - block.start if first < last else None


def _masks(step: StepInput, staged: Mapping[str, Tensor], rows: Tensor | None, block: slice) -> Masks | None:
    if rows is None:
        return None
    first = int(np.searchsorted(step.mask_row, block.start))
    return Masks(rows, staged["mask_of"][first : first + len(rows)].long(), staged["mask"])


def _top_rows(rows: Tensor | None, slot_R: Tensor) -> Tensor:
    return slot_R[:0] if rows is None else rows


def _filters(state: WorkerState, rows: Tensor | None, slot_R: Tensor) -> Filters | None:
    if rows is None:
        return None
    return Filters(rows, **_stage_columns(state, "filter", slot_R[rows]))


def _stage_columns(state: WorkerState, stage: Stage, slot_r: Tensor) -> dict[str, Tensor]:
    """Return the sampling parameters of one stage for slots `slot_r`, by name."""
    return {name: state.sampling[name][slot_r] for name, column in DEVICE_COLUMNS.items() if column.stage == stage}


def _bias(state: WorkerState, rows: Tensor | None, slot_R: Tensor) -> LogitBias | None:
    """Return all bias entries of `rows`; an entry that is not active adds 0 to token 0."""
    if rows is None:
        return None
    slots, tables = slot_R[rows], state.biases
    active = tables.until[slots] > state.columns.length[slots].unsqueeze(1)
    _, entries, tokens = tables.prefix.shape
    if entries:
        active[:, :entries] &= tables.follows_prefix(slots, state.generated_before(slots, tokens))
    token = torch.where(active, tables.token[slots], 0)
    value = torch.where(active, tables.value[slots], 0.0)
    return LogitBias(rows.repeat_interleave(token.shape[1]), token.flatten(), value.flatten())


def _penalties(
    state: WorkerState, step: StepInput, staged: Mapping[str, Tensor], rows: Tensor | None, slot_R: Tensor, block: slice
) -> Penalties | None:
    if rows is None:
        return None
    first = int(np.searchsorted(step.penalty_row, block.start))
    slots, columns = slot_R[rows], state.columns
    contexts = Contexts(
        page_table=columns.page_table,
        token_of=columns.token_of,
        page_size=state.page_size,
        slots=staged["context_slot"][first : first + len(rows)].long(),
        length=columns.length[slots],
        prompt_len=state.prompt_len[slots],
        max_len=step.max_kv,
    )
    return Penalties(rows, contexts, **_stage_columns(state, "penalty", slots))
