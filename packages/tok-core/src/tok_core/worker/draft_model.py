"""Run the draft model or EAGLE-3 head: draft tokens at the start of a step, on the device, without waiting for it.

A step says what to draft in its `ModelDrafts`. The draft model first reads chunks of tokens that it has not read yet,
then runs one pass for each drafted token. Passes of few rows replay CUDA graphs (`DraftGraphs`).

Legend: n sequences that draft, k tokens of the longest draft, R rows of the first pass, T tokens of the chunks or of
the target model's step, A width of the streams that a head reads, N hidden size of a head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tok_core.messages import ModelDrafts
from tok_core.model_config import ModelConfig
from tok_core.models import CausalLM, Eagle3LlamaForCausalLM, ForwardContext
from tok_core.runtime import HEARTBEAT
from tok_core.worker.cuda_graphs import SHORT_KV_TOKENS, GraphRecorder
from tok_core.worker.sampling import sampling_batch
from tok_core.worker.state import WorkerState
from tok_core.worker.step_tensors import concatenated_ranges
from tok_kernels import AttentionBatch, Backend, HostLengths, LayerCache, kv_position_bytes

DRAFT_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows; padding is cheap, and the last bounds the logits' memory

LaunchPass = Callable[[], None]
"""Launches a pass on fixed tensors, or replays its CUDA graph."""

AdvanceRows = Callable[[Tensor, Tensor, Tensor | None, int], None]
"""Runs a pass and advances its rows in place: `DraftModelRunner.advance`."""


def draft_bytes_per_token(draft: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one position in the draft model's cache, which is never quantised.

    The cache of a head has a hidden state for each position, too.
    """
    hidden_bytes = 0 if draft.eagle3 is None else draft.hidden_size * dtype.itemsize
    return draft.num_layers * kv_position_bytes(draft.num_kv_heads, draft.head_dim, dtype) + hidden_bytes


class HiddenStates:
    """Hidden states of the target model that a head drafts from, one for each position of each page: a StreamReader.

    Each step of the target model computes those of its tokens: the head's `fc` of the streams that the head reads.
    Every rank has all of them.
    """

    def __init__(self, head: Eagle3LlamaForCausalLM, state: WorkerState) -> None:
        config = head.config.eagle3
        assert config is not None
        self.streams = config.streams
        self._fc = head.model.fc
        self._cache_LN = state.add_hidden_states(head.config.hidden_size, head.dtype).flatten(0, 1)

    def read(self, x_TA: Tensor, step: ForwardContext) -> None:
        """Fuse the streams of a step's tokens, and write the hidden states to the cache."""
        hidden_TN: Tensor = self._fc(x_TA)
        if step.layout is not None:
            hidden_TN = step.layout.rows(hidden_TN, None)
        self._cache_LN.index_copy_(0, step.kv_index_T, hidden_TN)

    def at(self, kv_index: Tensor) -> Tensor:
        """Return a copy of the hidden states in these rows of the cache."""
        return self._cache_LN.index_select(0, kv_index)


class DraftPassRows(NamedTuple):
    """Rows of a pass. A row feeds `token` at `position` of `slot` if the position is before its `end`, else nothing.

    slot    int32 `[R]`; tokens, positions and ends are int64
    hidden  hidden states that a head reads, `[R, N]`; None: the draft model is no head
    """

    slot: Tensor
    token: Tensor
    position: Tensor
    end: Tensor
    hidden: Tensor | None


class DraftModelRunner:
    """Runner of the draft model; its cache has a place for each position in each page of the target model's `state`.

    A drafted token is sampled with the temperature of its sequence, and with the random numbers of its position.

    vocab_size  size of the target model's vocabulary: a drafted token beyond it becomes token 0
    reader      hidden states that a head reads; None: the draft model is no head

    The first row of a draft by a head reads a hidden state of the target model. Each further row reads the output of
    the row before. The row of a head that feeds the token of position p + 1 has position p, as the hidden state that
    it reads.
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
        self.kv = state.new_cache(
            (local.num_layers, 2, state.num_pages + 1, state.page_size, local.num_kv_heads, local.head_dim), model.dtype
        )
        self._caches = [LayerCache(*layer_kv) for layer_kv in self.kv]
        self.graphs = DraftGraphs(self.advance, state, hidden_size, model.dtype)

    def capture(self, graph_sizes: Sequence[int]) -> None:
        """Capture passes of these numbers of rows as CUDA graphs, if the backend's kernels can be captured."""
        if self._backend.capturable and graph_sizes:
            self.graphs.capture(graph_sizes, partial(capture_pass, recorder=GraphRecorder(self._state.device)))

    def host_arrays(self, drafts: ModelDrafts) -> dict[str, np.ndarray]:
        """Return the host arrays that `draft` needs, by name; only non-empty ones.

        Rows are padded to the size of a CUDA graph, if there is one.
        """
        padding_slot, rows = self._state.slots, len(drafts.slot)
        padding = (self.graphs.size(rows) or rows) - rows
        row = np.stack((drafts.token, drafts.position, drafts.end)).astype(np.int64)
        arrays = {
            "draft_slot": np.pad(drafts.slot, (0, padding), constant_values=padding_slot),
            "draft_row": np.pad(row, ((0, 0), (0, padding))),
            "draft_lent": np.where(drafts.lent >= 0, drafts.lent, padding_slot).astype(np.int64),
            **_chunk_arrays(drafts),
        }
        return {name: array for name, array in arrays.items() if array.size}

    def draft(self, drafts: ModelDrafts, staged: Mapping[str, Tensor], max_kv: int) -> Tensor:
        """Draft tokens, make them the last tokens of the slots lent, and return them, int32 `[n, k]`.

        staged  `host_arrays(drafts)` on the device
        max_kv  upper bound of the positions of a sequence
        """
        if len(drafts.chunk_slot):
            self._read_chunks(drafts, staged, max_kv)
        count, passes = drafts.lent.shape
        drafted = torch.zeros((count, passes), dtype=torch.int64, device=self._state.device)
        if not count:
            return drafted.int()
        slot, (token, position, end) = staged["draft_slot"], staged["draft_row"]
        hidden = None if self.reader is None else self.reader.at(self._state.kv_index(slot, position))
        rows = DraftPassRows(slot, token, position, end, hidden)
        graphs = self.graphs.size(len(drafts.slot)) is not None
        if graphs:
            self.graphs.load(staged, hidden)
        for number in range(passes):
            if graphs:
                sampled = self.graphs.replay(count if number else len(drafts.slot), max_kv)[:count]
            else:
                sampled, output = self._run_pass(rows, count, max_kv, self._host_lengths(drafts, number))
                hidden = None if rows.hidden is None else output
                rows = DraftPassRows(rows.slot[:count], sampled, rows.position[:count] + 1, rows.end[:count], hidden)
            drafted[:, number] = sampled
        self._state.columns.last_token[staged["draft_lent"]] = drafted
        return drafted.int()

    def advance(self, slot_R: Tensor, row_3R: Tensor, hidden_RN: Tensor | None, max_kv: int) -> None:
        """Run a pass of all rows, and advance them in place: each feeds the token that it has sampled next.

        slot_R     slots, int32
        row_3R     tokens, positions and ends, int64 `[3, R]`
        hidden_RN  hidden states that a head reads; None: the draft model is no head
        """
        token, position, end = row_3R
        rows = DraftPassRows(slot_R, token, position, end, hidden_RN)
        sampled, output_RN = self._run_pass(rows, len(slot_R), max_kv, None)
        token.copy_(sampled)
        position.add_(1)
        if hidden_RN is not None:
            hidden_RN.copy_(output_RN)

    def _read_chunks(self, drafts: ModelDrafts, staged: Mapping[str, Tensor], max_kv: int) -> None:
        """Compute the keys and values of the chunks."""
        position = staged["draft_chunk_position"].long()
        host = None
        if self._backend.needs_host_lengths:
            end = (drafts.chunk_start + drafts.chunk_count).astype(np.int32)
            host = HostLengths(drafts.chunk_count.astype(np.int32), end, np.zeros(len(end), np.int32))
        batch = AttentionBatch(
            page_table=self._state.columns.page_table,
            slots=staged["draft_chunk_slot"],
            q_start=staged["draft_chunk_q_start"],
            kv_len=staged["draft_chunk_end"],
            kv_start=torch.zeros_like(staged["draft_chunk_end"]),
            num_decode=0,
            max_q=int(drafts.chunk_count.max()),
            max_kv=max_kv,
            host=host,
        )
        kv_index = self._state.kv_index(staged["draft_chunk_slot_T"], position)
        no_logits = torch.zeros(1, dtype=torch.int64, device=position.device)
        hidden = None if self.reader is None else self.reader.at(kv_index)
        token = staged["draft_chunk_token"].long()
        self.model(token, position, kv_index, self._caches, batch, no_logits, hidden_TN=hidden)

    def _run_pass(
        self, rows: DraftPassRows, count: int, max_kv: int, host: HostLengths | None
    ) -> tuple[Tensor, Tensor]:
        """Feed the rows, and sample tokens of the first `count` rows.

        Return these tokens, and the model's output of the same rows. `rows.hidden` may change in place.
        """
        slot_R, live = rows.slot, rows.position < rows.end
        position_R = torch.where(live, rows.position, 0)
        kv_index = torch.where(live, self._state.kv_index(slot_R, position_R), self._state.columns.scratch)
        size = len(slot_R)
        batch = AttentionBatch(
            page_table=self._state.columns.page_table,
            slots=slot_R,
            q_start=torch.arange(size + 1, dtype=torch.int32, device=slot_R.device),
            kv_len=torch.where(live, position_R + 1, 0).int(),
            kv_start=torch.zeros_like(slot_R),
            num_decode=size,
            max_q=1,
            max_kv=max_kv,
            host=host,
        )
        logit_row = None if count == size else torch.arange(count, device=slot_R.device)
        output = self.model(rows.token, position_R, kv_index, self._caches, batch, logit_row, hidden_TN=rows.hidden)
        sampled_position = position_R[:count] + 1 + self._token_offset
        return self._sample(output, slot_R[:count], sampled_position), output

    def _sample(self, output_RN: Tensor, slot_R: Tensor, position_R: Tensor) -> Tensor:
        """Sample the tokens at these positions, as ids of the target model's vocabulary."""
        batch = replace(
            sampling_batch(self._state, slot_R), position=position_R, processed=False, shards=self.model.shards
        )
        sampled = self._backend.sample(self.model.logits(output_RN), batch).token
        if isinstance(self.model, Eagle3LlamaForCausalLM):
            return self.model.target_ids(sampled)
        if self.model.config.vocab_size > self._vocab_size:
            return torch.where(sampled < self._vocab_size, sampled, 0)
        return sampled

    def _host_lengths(self, drafts: ModelDrafts, number: int) -> HostLengths | None:
        """Return the lengths of the rows of pass `number`, from 0 on, for backends that plan on the host.

        A row that feeds nothing counts as one position, since not every kernel can be planned for none.
        """
        if not self._backend.needs_host_lengths:
            return None
        rows = len(drafts.slot) if number == 0 else len(drafts.lent)
        position = drafts.position[:rows] + number
        length: NDArray[np.int32] = np.where(position < drafts.end[:rows], position + 1, 1).astype(np.int32)
        return HostLengths(np.ones(rows, np.int32), length, np.zeros(rows, np.int32))


def _chunk_arrays(drafts: ModelDrafts) -> dict[str, np.ndarray]:
    """Return the host arrays of the chunks to read, by name."""
    start, count = drafts.chunk_start, drafts.chunk_count.astype(np.int64)
    return {
        "draft_chunk_slot": drafts.chunk_slot,
        "draft_chunk_slot_T": np.repeat(drafts.chunk_slot, count),
        "draft_chunk_token": drafts.chunk_token,
        "draft_chunk_position": concatenated_ranges(start, count).astype(np.int32),
        "draft_chunk_end": (start + count).astype(np.int32),
        "draft_chunk_q_start": np.concatenate(([0], np.cumsum(count))).astype(np.int32),
    }


class DraftGraphs:
    """CUDA graphs of draft passes, by number of rows and for short or long contexts; empty until `capture`.

    The graphs read rows from fixed tensors and advance them there, so that the passes of a step follow one another
    without copies. Padding rows are at their end, so that they feed nothing.

    hidden_size  that of a head; 0: the draft model is no head, and no hidden states are advanced
    """

    def __init__(self, advance: AdvanceRows, state: WorkerState, hidden_size: int, dtype: torch.dtype) -> None:
        self._advance = advance
        self._state = state
        self._hidden_size, self._dtype = hidden_size, dtype
        self._hidden_RN: Tensor | None = None
        self._sizes: list[int] = []  # ascending
        self._replays: dict[tuple[int, bool], LaunchPass] = {}  # by rows, and whether contexts may be long

    def __len__(self) -> int:
        return len(self._sizes)

    def size(self, rows: int) -> int | None:
        """Return the rows of the smallest graph with at least `rows` rows; None if there is none."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int], capture_pass: Callable[[LaunchPass], LaunchPass]) -> None:
        """Capture graphs of these sizes by `capture_pass`, the largest first, so that smaller ones reuse its memory."""
        largest_first, max_len = sorted(sizes)[::-1], self._state.max_len
        max_rows, slots, device = largest_first[0], self._state.slots, self._state.device
        self._slot_R = torch.full((max_rows,), slots, dtype=torch.int32, device=device)
        self._row_3R = torch.zeros((3, max_rows), dtype=torch.int64, device=device)
        if self._hidden_size:
            self._hidden_RN = torch.zeros((max_rows, self._hidden_size), dtype=self._dtype, device=device)
        for size in largest_first:
            hidden = None if self._hidden_RN is None else self._hidden_RN[:size]
            for long in (True, False) if max_len > SHORT_KV_TOKENS else (False,):
                max_kv = max_len if long else min(max_len, SHORT_KV_TOKENS)
                launch = partial(self._advance, self._slot_R[:size], self._row_3R[:, :size], hidden, max_kv)
                self._replays[size, long] = capture_pass(launch)
        self._sizes = largest_first[::-1]

    def load(self, staged: Mapping[str, Tensor], hidden: Tensor | None) -> None:
        """Copy the rows of a step's first pass, padded to the size of a graph, to where the graphs read them."""
        size = len(staged["draft_slot"])
        if hidden is not None:
            assert self._hidden_RN is not None
            self._hidden_RN[:size] = hidden
        self._slot_R[:size] = staged["draft_slot"]
        self._row_3R[:, :size] = staged["draft_row"]

    def replay(self, rows: int, max_kv: int) -> Tensor:
        """Run a pass of the first `rows` rows; return the tensor of the tokens sampled, which the next pass changes."""
        size = self.size(rows)
        assert size is not None
        self._replays[size, max_kv > SHORT_KV_TOKENS]()
        return self._row_3R[0]


def capture_pass(launch: LaunchPass, recorder: GraphRecorder) -> LaunchPass:
    """Launch a pass once, which compiles its kernels, and capture it; return the function that replays the graph."""
    HEARTBEAT.turned()
    launch()
    torch.cuda.synchronize(recorder.device)
    with recorder.recording() as graph:
        launch()
    return graph.replay
