"""Run the draft model or head: draft tokens at the start of a step, on the device, without waiting for it.

Legend: n sequences that draft, k tokens of the longest draft, R rows of the first pass, T tokens of the chunks or of
the target model's step, N hidden size of a head.
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
from tok_core.models import CausalLM, Eagle3LlamaForCausalLM, ForwardContext
from tok_core.worker.cuda_graphs import GraphRecorder
from tok_core.worker.draft_graphs import DraftGraphs, record
from tok_core.worker.state import WorkerState
from tok_kernels import AttentionBatch, Backend, HostLengths, LayerCache, SamplingBatch, kv_position_bytes


def draft_bytes_per_token(draft: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one position in the draft model's cache, whose numbers are never quantised.

    A head's cache has a hidden state for each position, too.
    """
    hidden_bytes = 0 if draft.eagle3 is None else draft.hidden_size * dtype.itemsize
    return draft.num_layers * kv_position_bytes(draft.num_kv_heads, draft.head_dim, dtype) + hidden_bytes


class HiddenStates:
    """Hidden states of the target model that a head drafts from, one for each position of each page: a StreamReader.

    Each step of the target model computes those of its tokens: `fc` of the streams that the head reads. Every rank has
    all of them.
    """

    def __init__(self, head: Eagle3LlamaForCausalLM, state: WorkerState) -> None:
        config = head.config.eagle3
        assert config is not None
        self.streams = config.streams
        self._fc = head.model.fc
        self._cache_LN = state.add_hidden(head.config.hidden_size, head.dtype).flatten(0, 1)

    def read(self, x_TA: Tensor, step: ForwardContext) -> None:
        """Fuse the streams of a step's tokens, and write the hidden states to the cache."""
        hidden_TN: Tensor = self._fc(x_TA)
        if step.layout is not None:
            hidden_TN = step.layout.rows(hidden_TN, None)
        self._cache_LN.index_copy_(0, step.kv_index_T, hidden_TN)

    def at(self, kv_index: Tensor) -> Tensor:
        """Return a copy of the hidden states in these rows of the cache."""
        return self._cache_LN.index_select(0, kv_index)


class DraftModelRunner:
    """Runner of the draft model, whose cache has a place for each position in each page of the target model's `state`.

    It samples with the temperature and the random numbers of the sequence at the token's position. `vocab_size` is that
    of the target model: token 0 takes the place of drafted tokens beyond it.

    The first row of a draft by a head reads a hidden state of the target model, and each further row the output of the
    row before. `reader` has these hidden states; None: the draft model is no head. The row of a head that feeds the
    token of position p + 1 has position p, as the hidden state that it reads.
    """

    def __init__(self, model: CausalLM, backend: Backend, state: WorkerState, vocab_size: int) -> None:
        self.model = model
        self._backend = backend
        self._state = state
        self._vocab_size = vocab_size
        local, hidden_size = model.local, 0
        self.reader: HiddenStates | None = None
        self._token_offset = 0  # from a row's position to that of the token that it feeds
        if isinstance(model, Eagle3LlamaForCausalLM):
            self.reader, hidden_size, self._token_offset = HiddenStates(model, state), local.hidden_size, 1
        self.kv = state.cache(
            (local.num_layers, 2, state.num_pages + 1, state.page_size, local.num_kv_heads, local.head_dim), model.dtype
        )
        self._caches = [LayerCache(*kv) for kv in self.kv]
        self.graphs = DraftGraphs(self._advance, state, hidden_size, model.dtype)

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
        hidden = None if self.reader is None else self.reader.at(self._kv_index(slot, position))
        graphs = self.graphs.size(len(drafts.slot)) is not None
        if graphs:
            self.graphs.load(put, hidden)
        for i in range(passes):
            if graphs:
                sampled = self.graphs.replay(count if i else len(drafts.slot), max_kv)[:count]
            else:
                host = self._host_lengths(drafts, i)
                sampled, hidden = self._pass(slot, token, position, end, hidden, count, max_kv, host)
                slot, token, position, end = slot[:count], sampled, position[:count] + 1, end[:count]
            found[:, i] = sampled
        self._state.columns.last_token[put["draft_lent"]] = found
        return found.int()

    def _advance(self, slot_R: Tensor, row_3R: Tensor, hidden_RN: Tensor | None, max_kv: int) -> None:
        """Run a pass of all rows, and let each go on with the token that it has sampled, in place."""
        token, position, end = row_3R
        sampled, output_RN = self._pass(slot_R, token, position, end, hidden_RN, len(slot_R), max_kv, None)
        token.copy_(sampled)
        position.add_(1)
        if hidden_RN is not None:
            hidden_RN.copy_(output_RN)

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
        hidden = None if self.reader is None else self.reader.at(kv_index)
        token = put["draft_chunk_token"].long()
        self.model(token, position, kv_index, self._caches, batch, no_logits, hidden_TN=hidden)

    def _pass(
        self,
        slot_R: Tensor,
        token_R: Tensor,
        position_R: Tensor,
        end_R: Tensor,
        hidden_RN: Tensor | None,
        count: int,
        max_kv: int,
        host: HostLengths | None,
    ) -> tuple[Tensor, Tensor]:
        """Feed a token of each row whose position is before its end, and sample tokens of the first `count` rows.

        Return these tokens, and the model's output of the same rows. `hidden_RN` may change in place.
        """
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
        output = self.model(token_R, position_R, kv_index, self._caches, batch, logit_row, hidden_TN=hidden_RN)
        slot, state = slot_R[:count], self._state
        seed, sample, _ = state.random_keys.index_select(1, slot)
        sampling = SamplingBatch(
            temperature=state.sampling["temperature"].index_select(0, slot),
            seed=seed,
            sample=sample,
            position=position_R[:count] + 1 + self._token_offset,
            shards=self.model.shards,
        )
        sampled = self._backend.sample(self.model.logits(output), sampling).token
        if isinstance(self.model, Eagle3LlamaForCausalLM):
            sampled = self.model.target_ids(sampled)
        elif self.model.config.vocab_size > self._vocab_size:
            sampled = torch.where(sampled < self._vocab_size, sampled, 0)
        return sampled, output

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
