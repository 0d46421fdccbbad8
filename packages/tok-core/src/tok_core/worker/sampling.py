"""Sample a step's tokens: compute logits, gather each row's sampling parameters, and call the backend.

`sampling_arrays` runs on the host, before the step's arrays are staged. `sample_tokens` runs on the last pipeline stage
in steps that do not sample within a CUDA graph.

Legend: R rows that sample, V vocabulary. An option is a sampling parameter that only some rows have: filters,
penalties, biases, masks, top log-probabilities. The step lists the rows of each option in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tok_core.messages import StepInput
from tok_core.models import CausalLM
from tok_core.parallel import VocabularyShards
from tok_core.sampling_params import DEVICE_COLUMNS, Stage
from tok_core.worker.state import WorkerState
from tok_kernels import Backend, Contexts, Filters, LogitBias, Masks, Penalties, Sampled, SamplingBatch

MAX_SAMPLED_ROWS = 2048  # rows sampled at once; bounds the memory of their logits
MAX_GATHERED_ROWS = 256  # the same, if ranks gather logits of the whole vocabulary

_OPTION_ROWS = ("filter_row", "penalty_row", "bias_row", "mask_row", "top_row")


def sampling_arrays(step: StepInput) -> dict[str, np.ndarray]:
    """Return the host arrays that `sample_tokens` needs, by name."""
    arrays = {"sample_slot": step.sample_slot}
    if len(step.mask_row):
        arrays |= {"mask_index": step.mask_index, "bitmask": step.bitmask}
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
    model: CausalLM,
    backend: Backend,
    state: WorkerState,
    step: StepInput,
    staged: Mapping[str, Tensor],
    hidden_RN: Tensor,
) -> Sampled:
    """Sample the tokens of the step's R rows.

    staged  `sampling_arrays(step)` on the device
    hidden  residual stream after the last layer, of the rows that sample

    Options need logits of the whole vocabulary. If the vocabulary is sharded and any row has an option, all ranks
    gather the logits of blocks with options.
    """
    has_options = any(len(getattr(step, name)) for name in _OPTION_ROWS)

    def sample(block: slice) -> Sampled:
        batch = _RowBlock(state, step, staged, block).sampling_batch()
        return _sample(backend, model.logits(hidden_RN[block]), batch, model.shards)

    size = MAX_GATHERED_ROWS if model.shards is not None and has_options else MAX_SAMPLED_ROWS
    return sample_in_blocks(sample, len(step.sample_slot), size)


def sample_in_blocks(sample: Callable[[slice], Sampled], rows: int, size: int) -> Sampled:
    """Call `sample` for blocks of at most `size` of the `rows`, one after the other, and concatenate the results."""
    sampled = [sample(slice(start, start + size)) for start in range(0, max(rows, 1), size)]
    if len(sampled) == 1:
        return sampled[0]
    return Sampled(
        token=torch.cat([block.token for block in sampled]),
        logprob=torch.cat([block.logprob for block in sampled]),
        top_token=torch.cat([block.top_token for block in sampled]),
        top_logprob=torch.cat([block.top_logprob for block in sampled]),
    )


def _sample(backend: Backend, logits_RV: Tensor, batch: SamplingBatch, shards: VocabularyShards | None) -> Sampled:
    """Sample rows from logits of whole rows, or of a shard of the vocabulary: then ranks gather them if need be."""
    needs_whole_rows = batch.top_logprobs or any(
        option is not None for option in (batch.penalties, batch.bias, batch.filters, batch.masks)
    )
    if shards is None or not needs_whole_rows:
        return backend.sample(logits_RV, replace(batch, shards=shards))
    sampled = backend.sample(shards.whole(logits_RV), batch)
    # Each rank has sampled from whole rows, but sums may differ between ranks in the last bit: use rank 0's tokens.
    return replace(sampled, token=shards.gather(sampled.token)[0])


class _OptionRows(NamedTuple):
    """Rows of a block that have an option.

    rows     int64 [r], relative to the start of the block
    entries  slice of the step's arrays of the option, such as `mask_index`, which have one entry for each of its rows
    """

    rows: Tensor
    entries: slice


@dataclass(frozen=True, slots=True)
class _RowBlock:
    """Consecutive rows of a step that are sampled at once.

    staged  `sampling_arrays(step)` on the device
    block   slice of the step's R rows
    """

    state: WorkerState
    step: StepInput
    staged: Mapping[str, Tensor]
    block: slice

    def sampling_batch(self) -> SamplingBatch:
        """Return the parameters of all rows, with each option for those of its rows that have it."""
        slot_R = self.staged["sample_slot"][self.block].long()
        return replace(
            sampling_batch(self.state, slot_R),
            penalties=self._penalties(slot_R),
            bias=self._bias(slot_R),
            filters=self._filters(slot_R),
            masks=self._masks(),
            top_logprobs=self.step.top_logprobs,
            top_rows=self._top_rows(slot_R) if self.step.top_logprobs else None,
            all_greedy=self.step.all_greedy,
        )

    def _option(self, name: str) -> _OptionRows | None:
        """Return the rows of one of `_OPTION_ROWS` that lie in the block; None: no row does."""
        # Rows ascend, so that the host knows without asking the device which of them lie in the block.
        first, last = np.searchsorted(getattr(self.step, name), (self.block.start, self.block.stop)).tolist()
        if first == last:
            return None
        return _OptionRows(self.staged[name][first:last].long() - self.block.start, slice(first, last))

    def _masks(self) -> Masks | None:
        option = self._option("mask_row")
        if option is None:
            return None
        return Masks(option.rows, self.staged["mask_index"][option.entries].long(), self.staged["bitmask"])

    def _top_rows(self, slot_R: Tensor) -> Tensor:
        option = self._option("top_row")
        return slot_R[:0] if option is None else option.rows

    def _filters(self, slot_R: Tensor) -> Filters | None:
        option = self._option("filter_row")
        if option is None:
            return None
        return Filters(option.rows, **self._stage_columns("filter", slot_R[option.rows]))

    def _stage_columns(self, stage: Stage, slot_r: Tensor) -> dict[str, Tensor]:
        """Return the sampling parameters of one stage for slots `slot_r`, by name."""
        columns = self.state.sampling
        return {name: columns[name][slot_r] for name, column in DEVICE_COLUMNS.items() if column.stage == stage}

    def _bias(self, slot_R: Tensor) -> LogitBias | None:
        """Return all bias entries of the rows that have some; an entry that is not active adds 0 to token 0."""
        option = self._option("bias_row")
        if option is None:
            return None
        slots, tables = slot_R[option.rows], self.state.biases
        active = tables.until[slots] > self.state.columns.length[slots].unsqueeze(1)
        _, entries, tokens = tables.prefix.shape
        if entries:
            active[:, :entries] &= tables.follows_prefix(slots, self.state.generated_before(slots, tokens))
        token = torch.where(active, tables.token[slots], 0)
        value = torch.where(active, tables.value[slots], 0.0)
        return LogitBias(option.rows.repeat_interleave(token.shape[1]), token.flatten(), value.flatten())

    def _penalties(self, slot_R: Tensor) -> Penalties | None:
        option = self._option("penalty_row")
        if option is None:
            return None
        slots, columns = slot_R[option.rows], self.state.columns
        contexts = Contexts(
            page_table=columns.page_table,
            token_of=columns.token_of,
            page_size=self.state.page_size,
            slots=self.staged["context_slot"][option.entries].long(),
            length=columns.length[slots],
            prompt_len=self.state.prompt_len[slots],
            max_len=self.step.max_kv,
        )
        return Penalties(option.rows, contexts, **self._stage_columns("penalty", slots))
