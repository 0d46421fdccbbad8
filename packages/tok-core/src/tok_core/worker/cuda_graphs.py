"""Capture decode steps as CUDA graphs, one per size and variant, and find the graph that replays a step.

A graph's kernels have fixed tensors and a fixed number of rows. A step replays the smallest graph with enough rows.
Padding rows use the slot that never holds a sequence, and choose no experts; padding groups have no rows. Kernels read
lengths on the device, so that one graph serves all lengths.

Graphs are captured at three moments:

- at the start, the largest ones (`capture`), whose memory the others reuse;
- in a worker that is idle, and whose device is, the others one by one (`capture_missing`);
- in the launch of a step, the graph that the step needs, if it is missing (`find`). That takes the host as long as one
  launch kernel by kernel.

The start launches the kernels of all graphs once (`launch_eagerly`), so that no capture compiles or loads a kernel.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tok_core.config import RankCoordinates
from tok_core.messages import StepInput
from tok_core.models import CausalLM, StreamReader
from tok_core.runtime import HEARTBEAT
from tok_core.worker.layer_kinds import different_layers_only
from tok_core.worker.ngram_drafts import NgramDrafter, padded_draft_rows
from tok_core.worker.sampling import MAX_SAMPLED_ROWS, sample_in_blocks
from tok_core.worker.staging import Staging
from tok_core.worker.state import WorkerState
from tok_core.worker.step_tensors import cascade_level, decode_kv_start, group_arrays, has_draft_rows, pack_arrays
from tok_kernels import AttentionBatch, Backend, DecodeRows, DraftRows, Sampled, SamplingBatch

# Graphs of few rows come in two variants, for short and for long contexts: the best kernel launch differs, and a graph
# fixes it.
MAX_VARIANT_ROWS = 512  # up to this many rows there are two variants
SHORT_KV_TOKENS = 2048  # longest context of the short variant
MAX_GRAPH_GROUPS = 256  # groups; steps with more, or with nested groups, are launched kernel by kernel
MAX_STALL_SECONDS = 0.05  # capture time up to which a start leaves captures to idle workers and to steps
NO_SAMPLED_TOKENS = torch.empty((2, 0), dtype=torch.int32)  # of a pipeline stage that is not the last
NO_DRAFTS = torch.empty(0, dtype=torch.int32)  # of a worker that does not predict drafts

log = logging.getLogger("tok_core")


def graph_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows to capture: 1, 2, 4, then multiples of 8, eight per doubling, and `max_rows` itself.

    >>> graph_sizes(200)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 200]
    """
    sizes = [size for size in (1, 2, 4) if size < max_rows]
    size = 8
    while size < max_rows:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 8)
    return [*sizes, max_rows]


def total_graph_rows(max_rows: int, *, drafts: bool = False) -> int:
    """Return the total rows of all graphs up to `max_rows`, each of which keeps its outputs; `drafts` doubles them."""
    total = sum(size * (4 if size <= MAX_VARIANT_ROWS else 2) for size in graph_sizes(max_rows))
    return 2 * total if drafts else total


class GraphKey(NamedTuple):
    """Size and variant of a graph.

    rows    decode rows
    groups  whether the step may have prefix groups
    long    whether contexts may be longer than SHORT_KV_TOKENS
    drafts  whether rows may verify drafted tokens; they form packs then, where these may have several rows
    """

    rows: int
    groups: bool
    long: bool
    drafts: bool = False

    @property
    def max_groups(self) -> int:
        """Return the maximum number of prefix groups; each has at least two rows."""
        return min(MAX_GRAPH_GROUPS, self.rows // 2) if self.groups else 0

    @property
    def max_sequences(self) -> int:
        """Return the maximum number of sequences with drafts; each has at least two rows."""
        return self.rows // 2 if self.drafts else 0


def padded_arrays(
    step: StepInput | None, key: GraphKey, padding_slot: int, max_pack_rows: int = 1, max_draft_tokens: int = 0
) -> dict[str, np.ndarray]:
    """Return slots, `kv_start`, groups, packs and drafts of a step, padded to the sizes of a graph.

    step              None: padding only
    max_draft_tokens  maximum number of tokens that the graph drafts for a sequence; 0: it does not draft
    """
    slots, kv_start = np.full(key.rows, padding_slot, np.int32), np.zeros(key.rows, np.int32)
    if step is not None:
        count = len(step.decode_slot)
        slots[:count] = step.decode_slot
        kv_start[:count] = decode_kv_start(step)
    level = step.levels[0] if step is not None and step.levels else None
    groups = group_arrays(0, level, key.max_groups) if key.groups else {}
    packs = pack_arrays(step, key.rows, max_pack_rows) if key.drafts and max_pack_rows > 1 else {}
    drafts = {}
    if key.drafts and max_draft_tokens:
        drafts["drafts"] = padded_draft_rows(step, key.max_sequences, max_draft_tokens, padding_slot)
    return {"slots": slots, "kv_start": kv_start} | groups | packs | drafts


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """Captured decode step.

    padding_slot      slot of padding rows
    max_pack_rows     maximum rows of a pack
    max_draft_tokens  maximum number of tokens that the graph drafts for a sequence; 0: it does not draft
    forward           computes `hidden` from slots and from the `stage_input` that the stage before sends; a graph with
                      drafts drafts first, if the worker predicts
    stage_input       received residual stream; None at the first stage
    hidden            hidden states `[rows, N]`, or the residual stream for the next stage
    sample_graph      at the last stage: samples from `hidden`
    sampled_tokens    int32 `[2, rows]`: sampled tokens, and the bits of their log-probabilities
    advance_graph     accepts drafts and learns, after sampling; None: the worker does not predict drafts
    advanced          result of `NgramDrafter.advance`, int32 `[max_sequences + rows]`
    inputs            tensors that the graphs read, kept alive: `q_start`, decode rows, and drafted tokens
    """

    key: GraphKey
    padding_slot: int
    max_pack_rows: int
    max_draft_tokens: int
    forward: torch.cuda.CUDAGraph
    stage_input: Tensor | None
    hidden: Tensor
    sample_graph: torch.cuda.CUDAGraph | None
    sampled_tokens: Tensor
    advance_graph: torch.cuda.CUDAGraph | None
    advanced: Tensor
    inputs: tuple[Tensor, DecodeRows, Tensor | None]

    def arrays(self, step: StepInput) -> dict[str, np.ndarray]:
        """Return the step's host arrays, padded to this graph; staged first, they get the addresses the graph reads."""
        return padded_arrays(step, self.key, self.padding_slot, self.max_pack_rows, self.max_draft_tokens)

    @staticmethod
    def can_sample(step: StepInput) -> bool:
        """Return whether `sample_graph` can sample the step: no row has an option, as sampling.py calls them."""
        option_rows = step.filter_row, step.penalty_row, step.bias_row, step.mask_row
        return not (step.top_logprobs or any(map(len, option_rows)))


class DecodeGraphs:
    """CUDA graphs of one model's decode steps, by GraphKey; empty until `capture`.

    prefix_groups  whether there are graphs of steps with prefix groups
    max_pack_rows  maximum rows of a pack; 1: there are no packs
    drafter        predicts drafts; None: the worker does not
    reader         reads the residual stream of each step
    """

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        state: WorkerState,
        staging: Staging,
        coordinates: RankCoordinates,
        *,
        prefix_groups: bool = True,
        max_pack_rows: int = 1,
        drafter: NgramDrafter | None = None,
        reader: StreamReader | None = None,
    ) -> None:
        self._model = model
        self._reader = reader
        self._backend = backend
        self._state = state
        self._staging = staging
        self._coordinates = coordinates
        self._prefix_groups = prefix_groups
        self._max_pack_rows = max_pack_rows
        self._drafter = drafter
        self._stage_input: Tensor | None = None  # shared by all graphs, since only one of them runs at a time
        self._sizes: list[int] = []  # ascending
        self._recorder: GraphRecorder | None = None
        self._graphs: dict[GraphKey, DecodeGraph] = {}
        self._uncaptured: dict[GraphKey, None] = {}  # in the order in which an idle worker captures them
        self._suspended = False  # weights or KV cache have no memory
        self._stale = False  # graphs read old parameters, and must be captured again
        self._memory_full = False  # a capture has found no memory
        self._capture_seconds = 0.0  # of captures by steps since the last `take_capture_seconds`

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def have_drafts(self) -> bool:
        """Return whether there are graphs of steps with drafts."""
        return self._max_pack_rows > 1 or self._drafter is not None

    @property
    def missing(self) -> int:
        """Return how many graphs an idle worker can capture now."""
        return 0 if self._suspended or self._memory_full else len(self._uncaptured)

    def capture_missing(self) -> None:
        """Capture one of the `missing` graphs, if there is any. An idle worker calls this."""
        if self.missing:
            self._try_capture(next(iter(self._uncaptured)))

    def take_capture_seconds(self) -> float:
        """Return the time that steps took to capture graphs since the last call."""
        seconds, self._capture_seconds = self._capture_seconds, 0.0
        return seconds

    def find(self, step: StepInput) -> DecodeGraph | None:
        """Return the graph that replays a step, captured now if it is missing.

        None for steps with prefill chunks or nested groups, for too large ones, and if no memory is left for a capture.
        """
        count, groups = len(step.decode_slot), len(step.levels[0].start) if step.levels else 0
        if len(step.prefill_slot) or len(step.levels) > 1 or not self._sizes or count > self._sizes[-1]:
            return None
        rows = self._sizes[bisect_left(self._sizes, count)]
        long = step.max_kv > SHORT_KV_TOKENS or not self._has_short_variant(rows)
        key = GraphKey(rows, groups > 0, long, drafts=self.have_drafts and has_draft_rows(step))
        if groups > key.max_groups or (groups and not self._prefix_groups):
            return None
        if key not in self._graphs and not self._memory_full:
            self._capture_seconds += self._try_capture(key)
        return self._graphs.get(key)

    @torch.inference_mode()
    def launch_eagerly(self, graph_sizes: Sequence[int]) -> None:
        """Launch the kernels of all graphs of these sizes one by one, which compiles and loads them before captures."""
        if not self._coordinates.first:
            self._allocate_stage_input(graph_sizes)
        for key in self._keys(graph_sizes):
            HEARTBEAT.turned()
            staged, q_start = self._padding_inputs(key)
            draft_kn = self._draft(staged)
            hidden, rows = self._forward(key, staged, q_start)
            if self._coordinates.last:
                self._sample(staged, hidden, rows)
            self._advance(staged, draft_kn)

    def capture(self, graph_sizes: Iterable[int]) -> None:
        """Replace all graphs by graphs of these sizes, whose kernels `launch_eagerly` has loaded.

        Only the largest are captured now. All are captured now, the largest first, if the replica has several workers,
        which must capture together, or if a capture takes so long that it would stall a step.
        """
        self._sizes, self._graphs, self._memory_full = sorted(graph_sizes), {}, False
        self._uncaptured = dict.fromkeys(self._keys(self._sizes[::-1]))
        if not self._sizes:
            return
        self._recorder = GraphRecorder(self._state.device)
        # The least time counts, since the first capture of a process takes longer.
        seconds = min([self._capture(key) for key in self._keys(self._sizes[-1:])])
        if self._coordinates.workers > 1 or seconds > MAX_STALL_SECONDS:
            for key in self._keys(self._sizes[-2::-1]):
                self._capture(key)

    def capture_again(self) -> None:
        """Discard all graphs, since parameters of the model were replaced, and capture as at the start.

        While weights or KV cache have no memory, this waits for `suspend(False)`.
        """
        self._stale = bool(self._sizes)
        if self._suspended or not self._stale:
            return
        with different_layers_only(self._model, self._state):
            self.launch_eagerly(self._sizes)  # parameters of other dtypes have other kernels
        self.capture(self._sizes)
        self._stale = False  # after an error, the next call of `suspend` tries again

    def suspend(self, suspended: bool) -> None:
        """Record whether weights or KV cache have no memory now: no graph is captured meanwhile."""
        self._suspended = suspended
        if self._stale:
            self.capture_again()

    def _try_capture(self, key: GraphKey) -> float:
        """Capture a graph while the engine runs, and return the seconds taken.

        If no memory is left for it, no further graph is captured, and steps launch their kernels one by one.
        """
        try:
            seconds = self._capture(key)
        except RuntimeError as error:
            # The driver, which allocates the graph itself, raises no torch.OutOfMemoryError.
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            self._memory_full = True
            log.warning("no memory is left for further CUDA graphs: some steps launch kernels one by one (%s)", error)
            return 0.0
        log.debug("CUDA graph of %d rows captured in %.0f ms: %s", key.rows, seconds * 1e3, key)
        return seconds

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> float:
        """Capture a graph, and return the seconds that it took the host."""
        HEARTBEAT.turned()
        began = time.monotonic()
        assert self._recorder is not None
        staged, q_start = self._padding_inputs(key)
        sample_graph, sampled_tokens = None, NO_SAMPLED_TOKENS
        advance_graph, advanced = None, NO_DRAFTS
        with self._recorder.recording() as forward:
            draft_kn = self._draft(staged)
            hidden, rows = self._forward(key, staged, q_start)
        if self._coordinates.last:
            with self._recorder.recording() as sample_graph:
                sampled_tokens = self._sample(staged, hidden, rows)
        if self._drafter is not None:
            with self._recorder.recording() as advance_graph:
                advanced = self._advance(staged, draft_kn)
        self._graphs[key] = DecodeGraph(
            key=key,
            padding_slot=self._state.slots,
            max_pack_rows=self._max_pack_rows,
            max_draft_tokens=self._state.max_draft_tokens,
            forward=forward,
            stage_input=self._stage_input_of(key.rows),
            hidden=hidden,
            sample_graph=sample_graph,
            sampled_tokens=sampled_tokens,
            advance_graph=advance_graph,
            advanced=advanced,
            inputs=(q_start, rows, draft_kn),
        )
        del self._uncaptured[key]
        return time.monotonic() - began

    def _keys(self, graph_sizes: Iterable[int]) -> Iterator[GraphKey]:
        """Yield all variants of graphs of these sizes; a single row is in no group and verifies no draft."""
        for rows in graph_sizes:
            for groups in (False, True) if self._prefix_groups and rows > 1 else (False,):
                for long in (True, False) if self._has_short_variant(rows) else (True,):
                    for drafts in (False, True) if self.have_drafts and rows > 1 else (False,):
                        yield GraphKey(rows, groups, long, drafts)

    def _has_short_variant(self, rows: int) -> bool:
        return rows <= MAX_VARIANT_ROWS and self._state.max_len > SHORT_KV_TOKENS

    def _padding_inputs(self, key: GraphKey) -> tuple[dict[str, Tensor], Tensor]:
        """Return the staged arrays of a step of padding rows, and its `q_start`."""
        state = self._state
        staged = self._staging.put(padded_arrays(None, key, state.slots, self._max_pack_rows, state.max_draft_tokens))
        return staged, torch.arange(key.rows + 1, dtype=torch.int32, device=self._state.device)

    def _allocate_stage_input(self, graph_sizes: Iterable[int]) -> None:
        """Allocate the residual stream of the largest size, `[rows, N]`; zeros, since eager launches read it."""
        rows = max((self._model.stream_rows(size) for size in graph_sizes), default=0)
        shape = rows, self._model.config.hidden_size
        self._stage_input = torch.zeros(shape, dtype=self._model.dtype, device=self._state.device)

    def _stage_input_of(self, rows: int) -> Tensor | None:
        """Return the residual stream that graphs of a size read; None at the first stage."""
        return None if self._stage_input is None else self._stage_input[: self._model.stream_rows(rows)]

    def _draft(self, staged: dict[str, Tensor]) -> Tensor | None:
        """Draft for the rows of the graph, and return the drafted tokens; None: it has no drafts."""
        if self._drafter is None or "drafts" not in staged:
            return None
        return self._drafter.draft(DraftRows(*staged["drafts"]))

    def _advance(self, staged: dict[str, Tensor], draft_kn: Tensor | None) -> Tensor:
        """Return `DecodeGraph.advanced`."""
        if self._drafter is None:
            return NO_DRAFTS
        drafts = DraftRows(*staged["drafts"]) if "drafts" in staged else None
        return self._drafter.advance(staged["slots"], drafts, draft_kn)

    def _forward(self, key: GraphKey, staged: dict[str, Tensor], q_start: Tensor) -> tuple[Tensor, DecodeRows]:
        """Run this stage's layers on a decode step; return `DecodeGraph.hidden`, and the decode rows."""
        state, max_kv = self._state, self._state.max_len if key.long else SHORT_KV_TOKENS
        rows = self._backend.decode_rows(staged["slots"], state.columns)
        batch = AttentionBatch(
            page_table=state.columns.page_table,
            slots=staged["slots"],
            q_start=q_start,
            kv_len=rows.kv_len,
            kv_start=staged["kv_start"],
            num_decode=key.rows,
            max_q=1,
            max_kv=max_kv,
            levels=(cascade_level(staged, 0, key.rows, max_kv),) if key.groups else (),
            packs=staged.get("packs"),
        )
        stage_input = self._stage_input_of(key.rows)
        x_T = rows.token if stage_input is None else stage_input
        hidden: Tensor = self._model(
            *(x_T, rows.position, rows.kv_index, state.caches, batch, None), reader=self._reader
        )
        return hidden, rows

    def _sample(self, staged: dict[str, Tensor], hidden: Tensor, rows: DecodeRows) -> Tensor:
        """Sample every row without options; return `DecodeGraph.sampled_tokens`."""
        state = self._state

        def sample(block: slice) -> Sampled:
            batch = SamplingBatch(
                temperature=rows.temperature[block],
                seed=rows.seed[block],
                sample=rows.sample[block],
                position=rows.next_position[block],
                shards=self._model.shards,
                processed=state.processed_logprobs,
            )
            return self._backend.sample(self._model.logits(hidden[block]), batch)

        sampled = sample_in_blocks(sample, len(hidden), MAX_SAMPLED_ROWS)
        return self._backend.record_sampled_tokens(staged["slots"], sampled.token, sampled.logprob, state.columns)


class GraphRecorder:
    """Recorder of CUDA graphs that share a memory pool, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture a graph. Unlike `torch.cuda.graph`, do not release the allocator's unused blocks."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()
