"""Run the draft model: draft tokens at the start of a step, on the device, without waiting for it.

Legend: n sequences that draft, k tokens of the longest draft, R rows of the first pass, T tokens of the chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tok_core.messages import ModelDrafts
from tok_core.model_config import ModelConfig
from tok_core.models import CausalLM
from tok_core.worker.cuda_graphs import GraphRecorder
from tok_core.worker.draft_graphs import DraftGraphs, record
from tok_core.worker.state import WorkerState
from tok_kernels import AttentionBatch, Backend, HostLengths, LayerCache, SamplingBatch, kv_position_bytes


def draft_bytes_per_token(draft: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one position in the draft model's cache, whose numbers are never quantised."""
    return draft.num_layers * kv_position_bytes(draft.num_kv_heads, draft.head_dim, dtype)


class DraftModelRunner:
    """Runner of the draft model, whose cache has a place for each position in each page of the target model's `state`.

    It samples with the temperature and the random numbers of the sequence at the token's position. `vocab_size` is that
    of the target model: token 0 takes the place of drafted tokens beyond it.
    """

    def __init__(self, model: CausalLM, backend: Backend, state: WorkerState, vocab_size: int) -> None:
        self.model = model
        self._backend = backend
        self._state = state
        self._vocab_size = vocab_size
        local = model.local
        self.kv = state.cache(
            (local.num_layers, 2, state.num_pages + 1, state.page_size, local.num_kv_heads, local.head_dim), model.dtype
        )
        self._caches = [LayerCache(*kv) for kv in self.kv]
        self.graphs = DraftGraphs(self._advance, state)

    def capture(self, graph_sizes: Sequence[int]) -> None:
        """Capture passes of these numbers of rows as CUDA graphs, if the backend's kernels can be captured."""
        if self._backend.capturable and graph_sizes:
            self.graphs.capture(graph_sizes, partial(record, recorder=GraphRecorder(self._state.device)))

    def arrays(self, drafts: ModelDrafts) -> dict[str, np.ndarray]:
        """Return the host arrays that `draft` needs, by name; only non-empty ones.

        Rows are padded to the size of a CUDA graph, if there is one.
        """
        padding, rows = self._state.slots, len(drafts.slot)
        more = (self.graphs.size(rows) or rows) - rows
        row = np.stack((drafts.token, drafts.position, drafts.end)).astype(np.int64)
        arrays = {
            "draft_slot": np.pad(drafts.slot, (0, more), constant_values=padding),
            "draft_row": np.pad(row, ((0, 0), (0, more))),
            "draft_lent": np.where(drafts.lent >= 0, drafts.lent, padding).astype(np.int64),
            **_chunk_arrays(drafts),
        }
        return {name: array for name, array in arrays.items() if array.size}

    def draft(self, drafts: ModelDrafts, put: Mapping[str, Tensor], max_kv: int) -> Tensor:
        """Draft tokens, make them the last tokens of the slots lent, and return them, int32 `[n, k]`.

        put     the arrays of `arrays(drafts)` on the device
        max_kv  bound of the positions of a sequence
        """
        if len(drafts.chunk_slot):
            self._read(drafts, put, max_kv)
        count, passes = drafts.lent.shape
        found = torch.zeros((count, passes), dtype=torch.int64, device=self._state.device)
        if not count:
            return found.int()
        slot, (token, position, end) = put["draft_slot"], put["draft_row"]
        graphs = self.graphs.size(len(drafts.slot)) is not None
        if graphs:
            self.graphs.load(put)
        for i in range(passes):
            if graphs:
                sampled = self.graphs.replay(count if i else len(drafts.slot), max_kv)[:count]
            else:
                sampled = self._pass(slot, token, position, end, count, max_kv, self._host_lengths(drafts, i))
                slot, token, position, end = slot[:count], sampled, position[:count] + 1, end[:count]
            found[:, i] = sampled
        self._state.columns.last_token[put["draft_lent"]] = found
        return found.int()

    def _advance(self, slot_R: Tensor, row_3R: Tensor, max_kv: int) -> None:
        """Run a pass of all rows, and let each go on with the token that it has sampled, in place."""
        token, position, end = row_3R
        sampled = self._pass(slot_R, token, position, end, len(slot_R), max_kv, None)
        token.copy_(sampled)
        position.add_(1)

    def _read(self, drafts: ModelDrafts, put: Mapping[str, Tensor], max_kv: int) -> None:
        """Compute the keys and values of the chunks."""
        position = put["draft_chunk_position"].long()
        host = None
        if self._backend.needs_host_lengths:
            end = (drafts.chunk_start + drafts.chunk_count).astype(np.int32)
            host = HostLengths(drafts.chunk_count.astype(np.int32), end, np.zeros(len(end), np.int32))
        batch = AttentionBatch(
            page_table=self._state.columns.page_table,
            slots=put["draft_chunk_slot"],
            q_start=put["draft_chunk_q_start"],
            kv_len=put["draft_chunk_end"],
            kv_start=torch.zeros_like(put["draft_chunk_end"]),
            num_decode=0,
            max_q=int(drafts.chunk_count.max()),
            max_kv=max_kv,
            host=host,
        )
        kv_index = self._kv_index(put["draft_chunk_slot_T"], position)
        no_logits = torch.zeros(1, dtype=torch.int64, device=position.device)
        self.model(put["draft_chunk_token"].long(), position, kv_index, self._caches, batch, no_logits)

    def _pass(
        self,
        slot_R: Tensor,
        token_R: Tensor,
        position_R: Tensor,
        end_R: Tensor,
        count: int,
        max_kv: int,
        host: HostLengths | None,
    ) -> Tensor:
        """Feed a token of each row whose position is before its end, and sample tokens of the first `count` rows."""
        live = position_R < end_R
        position_R = torch.where(live, position_R, 0)
        kv_index = torch.where(live, self._kv_index(slot_R, position_R), self._state.columns.scratch)
        rows = len(slot_R)
        batch = AttentionBatch(
            page_table=self._state.columns.page_table,
            slots=slot_R,
            q_start=torch.arange(rows + 1, dtype=torch.int32, device=slot_R.device),
            kv_len=torch.where(live, position_R + 1, 0).int(),
            kv_start=torch.zeros_like(slot_R),
            num_decode=rows,
            max_q=1,
            max_kv=max_kv,
            host=host,
        )
        logit_row = None if count == rows else torch.arange(count, device=slot_R.device)
        hidden = self.model(token_R, position_R, kv_index, self._caches, batch, logit_row)
        slot, state = slot_R[:count], self._state
        seed, sample, _ = state.random_keys.index_select(1, slot)
        sampling = SamplingBatch(
            temperature=state.sampling["temperature"].index_select(0, slot),
            seed=seed,
            sample=sample,
            position=position_R[:count] + 1,
            shards=self.model.shards,
        )
        sampled = self._backend.sample(self.model.logits(hidden), sampling).token
        return sampled if self.model.config.vocab_size <= self._vocab_size else _within(sampled, self._vocab_size)

    def _kv_index(self, slot: Tensor, position: Tensor) -> Tensor:
        """Return the flat cache rows of positions, int64."""
        size = self._state.page_size
        page = self._state.columns.page_table[slot.long(), position // size].long()
        return page * size + position % size

    def _host_lengths(self, drafts: ModelDrafts, number: int) -> HostLengths | None:
        """Return the lengths of the rows of a pass, counted from 0, for backends that plan on the host.

        Rows that feed nothing count as one position, since not every kernel can be planned for none.
        """
        if not self._backend.needs_host_lengths:
            return None
        rows = len(drafts.slot) if number == 0 else len(drafts.lent)
        fed = drafts.position[:rows] + number
        length: NDArray[np.int32] = np.where(fed < drafts.end[:rows], fed + 1, 1).astype(np.int32)
        return HostLengths(np.ones(rows, np.int32), length, np.zeros(rows, np.int32))


def _chunk_arrays(drafts: ModelDrafts) -> dict[str, np.ndarray]:
    count = drafts.chunk_count.astype(np.int64)
    before = np.cumsum(count) - count
    return {
        "draft_chunk_slot": drafts.chunk_slot,
        "draft_chunk_slot_T": np.repeat(drafts.chunk_slot, count),
        "draft_chunk_token": drafts.chunk_token,
        "draft_chunk_position": (np.repeat(drafts.chunk_start - before, count) + np.arange(count.sum())).astype(
            np.int32
        ),
        "draft_chunk_end": (drafts.chunk_start + drafts.chunk_count).astype(np.int32),
        "draft_chunk_q_start": np.concatenate(([0], np.cumsum(count))).astype(np.int32),
    }


def _within(token: Tensor, vocab_size: int) -> Tensor:
    return torch.where(token < vocab_size, token, 0)
