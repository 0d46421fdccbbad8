"""Capture decode steps as CUDA graphs, once per size and variant, and find the graph that replays a step.

A graph's kernels have fixed tensors and a fixed number of rows. A step runs on the smallest graph with enough rows.
Padding rows use the slot that never holds a sequence, and choose no experts; padding groups have no rows. Kernels read
lengths on the device, so that one graph serves all lengths.

Only the largest graphs, whose memory the others reuse, are captured at the start. An idle worker captures the others
one by one, and the first step that needs a graph captures it, which takes the host as long as one launch kernel by
kernel. All kernels are loaded before (`DecodeGraphs.launch`), so that a capture neither compiles nor loads any.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tok_core.config import RankCoordinates
from tok_core.messages import StepInput
from tok_core.models import CausalLM, StreamReader
from tok_core.runtime import HEARTBEAT
from tok_core.worker import step_tensors
from tok_core.worker.layer_kinds import different_layers_only
from tok_core.worker.sampling import sampling_batch
from tok_core.worker.staging import Staging
from tok_core.worker.state import WorkerState
from tok_kernels import AttentionBatch, Backend

MAX_GRAPH_GROUPS = 256  # prefix groups; steps with more, or with nested groups, are launched kernel by kernel
# Graphs of few rows come in two variants, for short and for long contexts: the best kernel launch differs, and a graph
# fixes it.
FINE_GRAPH_ROWS = 512  # up to this many there are two variants
SHORT_KV_TOKENS = 2048  # longest context of the short variant
MAX_STALL_SECONDS = 0.05  # capture time up to which graphs are left to the steps that need them

log = logging.getLogger("tok_core")


class GraphKey(NamedTuple):
    """Variant of a graph of one size: with or without prefix groups, for long or short contexts."""

    groups: bool
    long: bool


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """Captured decode step of `rows` rows in at most `groups` prefix groups.

    padding         slot of padding rows
    forward         computes `hidden` from slots, and from the `stage_input` that the stage before sends
    stage_input     received residual stream; None at the first stage
    hidden          hidden states `[rows, N]`, or the residual stream for the next stage
    sample_graph    at the last stage: samples from `hidden`
    sampled_tokens  int32 `[2, rows]`: sampled tokens, and the bits of their log-probabilities
    """

    rows: int
    groups: int
    padding: int
    forward: torch.cuda.CUDAGraph
    stage_input: Tensor | None
    hidden: Tensor
    sample_graph: torch.cuda.CUDAGraph | None
    sampled_tokens: Tensor
    inputs: tuple[Tensor, ...]  # kept alive, because the graphs read them

    def arrays(self, step: StepInput) -> dict[str, np.ndarray]:
        """Return the step's host arrays, padded to this size; staged first, they get the addresses the graph reads."""
        return _arrays(step, self.rows, self.groups, self.padding)

    @staticmethod
    def can_sample(step: StepInput) -> bool:
        """Return whether plain sampling suffices: no row requests filters, penalties, biases, masks or top tokens."""
        requests = step.filter_row, step.penalty_row, step.bias_row, step.mask_row
        return not (step.top_logprobs or any(map(len, requests)))


class DecodeGraphs:
    """CUDA graphs of one model, by size and variant; empty until `capture`.

    `prefix_groups`: there are graphs of steps with prefix groups, too. `reader` reads the residual stream of each step.
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
        reader: StreamReader | None = None,
    ) -> None:
        self._model = model
        self._reader = reader
        self._backend = backend
        self._state = state
        self._staging = staging
        self._coordinates = coordinates
        self._prefix_groups = prefix_groups
        self._stage_input: Tensor | None = None  # shared by all graphs, since only one of them runs at a time
        self._sizes: list[int] = []
        self._suspended = self._stale = self._memory_full = False
        self._recorder: GraphRecorder | None = None
        self._graphs: dict[tuple[int, GraphKey], DecodeGraph] = {}
        self._uncaptured: dict[tuple[int, GraphKey], None] = {}  # in the order in which an idle worker captures them
        self._capture_seconds = 0.0  # of captures by steps since the last `take_capture_seconds`

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def missing(self) -> int:
        """Return how many graphs an idle worker can capture now."""
        return 0 if self._suspended or self._memory_full else len(self._uncaptured)

    def capture_missing(self) -> None:
        """Capture one of the `missing` graphs, if there is any."""
        if self.missing:
            self._capture_late(*next(iter(self._uncaptured)))

    def take_capture_seconds(self) -> float:
        """Return the time that steps took to capture graphs since the last call."""
        seconds, self._capture_seconds = self._capture_seconds, 0.0
        return seconds

    def find(self, step: StepInput) -> DecodeGraph | None:
        """Return the graph for a step, captured now if it is the first of its kind.

        None for steps with prefill chunks or nested groups, for too large ones, and if no memory is left for a capture.
        """
        count, groups = len(step.decode_slot), len(step.levels[0].start) if step.levels else 0
        if len(step.prefill_slot) or len(step.levels) > 1 or not self._sizes or count > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        if groups > _group_count(size, self._prefix_groups):
            return None
        key = GraphKey(groups > 0, step.max_kv > SHORT_KV_TOKENS or not self._has_short_variant(size))
        if (size, key) not in self._graphs and not self._memory_full:
            self._capture_seconds += self._capture_late(size, key)
        return self._graphs.get((size, key))

    @torch.inference_mode()
    def launch(self, graph_sizes: Sequence[int]) -> None:
        """Launch the kernels of all graphs of these sizes one by one: compile or load them ahead of captures."""
        if not self._coordinates.first:
            self._allocate_stage_input(graph_sizes)
        for size, key in self._keys(graph_sizes):
            HEARTBEAT.turned()
            put, q_start = self._inputs(size, key)
            hidden = self._forward(put, self._input_of_stage(size), q_start, self._max_kv(key))
            if self._coordinates.last:
                self._sample(put, hidden)

    def capture(self, graph_sizes: Iterable[int]) -> None:
        """Offer graphs of these sizes, whose kernels `launch` has loaded, in place of those offered before.

        All are captured now, the largest first, if workers must capture together or if a capture would stall a step.
        """
        self._sizes, self._graphs, self._memory_full = sorted(graph_sizes), {}, False
        self._uncaptured = dict.fromkeys(self._keys(self._sizes[::-1]))
        if not self._sizes:
            return
        self._recorder = GraphRecorder(self._state.device)
        # The least time counts, since the first capture of a process takes longer.
        seconds = min([self._timed_capture(size, key) for size, key in self._keys(self._sizes[-1:])])
        if self._coordinates.workers > 1 or seconds > MAX_STALL_SECONDS:
            for size, key in self._keys(self._sizes[-2::-1]):
                self._timed_capture(size, key)

    def capture_again(self) -> None:
        """Discard all graphs, once parameters of the model were replaced, and capture as at the start.

        While memory is released, this waits until it is there again.
        """
        self._stale = bool(self._sizes)
        if self._suspended or not self._stale:
            return
        with different_layers_only(self._model, self._state):
            self.launch(self._sizes)  # parameters of other dtypes have other kernels
        self.capture(self._sizes)
        self._stale = False  # after an error, the next call of `suspend` tries again

    def suspend(self, suspended: bool) -> None:
        """Take note whether weights or KV cache have no memory now, so that no graph can be captured."""
        self._suspended = suspended
        if self._stale:
            self.capture_again()

    def _capture_late(self, size: int, key: GraphKey) -> float:
        """Capture a graph between steps, or none from then on if no memory is left for it. Return the seconds taken."""
        try:
            seconds = self._timed_capture(size, key)
        except RuntimeError as error:
            # The driver, which allocates the graph itself, raises no torch.OutOfMemoryError.
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            self._memory_full = True
            log.warning("no memory is left for further CUDA graphs: some steps launch kernels one by one (%s)", error)
            return 0.0
        log.debug("CUDA graph of %d rows captured in %.0f ms: %s", size, seconds * 1e3, key)
        return seconds

    def _timed_capture(self, size: int, key: GraphKey) -> float:
        """Capture a graph, and return the seconds that it took the host."""
        began = time.monotonic()
        self._graphs[size, key] = self._capture(size, key)
        del self._uncaptured[size, key]
        return time.monotonic() - began

    @torch.inference_mode()
    def _capture(self, size: int, key: GraphKey) -> DecodeGraph:
        HEARTBEAT.turned()
        assert self._recorder is not None
        put, q_start = self._inputs(size, key)
        stage_input, sample_graph, sampled_tokens = self._input_of_stage(size), None, NO_SAMPLED_TOKENS
        with self._recorder.recording() as forward:
            hidden = self._forward(put, stage_input, q_start, self._max_kv(key))
        if self._coordinates.last:
            with self._recorder.recording() as sample_graph:
                sampled_tokens = self._sample(put, hidden)
        padding, groups = self._state.slots, _group_count(size, key.groups)
        return DecodeGraph(
            size, groups, padding, forward, stage_input, hidden, sample_graph, sampled_tokens, (q_start,)
        )

    def _keys(self, graph_sizes: Iterable[int]) -> Iterator[tuple[int, GraphKey]]:
        """Yield the sizes and variants of all graphs; a single row is in no group."""
        for size in graph_sizes:
            for groups in (False, True) if self._prefix_groups and size > 1 else (False,):
                for long in (True, False) if self._has_short_variant(size) else (True,):
                    yield size, GraphKey(groups, long)

    def _has_short_variant(self, size: int) -> bool:
        return size <= FINE_GRAPH_ROWS and self._state.max_len > SHORT_KV_TOKENS

    def _max_kv(self, key: GraphKey) -> int:
        return self._state.max_len if key.long else SHORT_KV_TOKENS

    def _inputs(self, size: int, key: GraphKey) -> tuple[dict[str, Tensor], Tensor]:
        """Return the arrays of a step of padding rows on the device, and its `q_start`."""
        put = self._staging.put(_arrays(None, size, _group_count(size, key.groups), self._state.slots))
        return put, torch.arange(size + 1, dtype=torch.int32, device=self._state.device)

    def _allocate_stage_input(self, graph_sizes: Iterable[int]) -> None:
        """Allocate the input of all sizes, `[rows, N]`; zeros, because steps run on it before their capture."""
        rows = max((self._model.stream_rows(size) for size in graph_sizes), default=0)
        shape = rows, self._model.config.hidden_size
        self._stage_input = torch.zeros(shape, dtype=self._model.dtype, device=self._state.device)

    def _input_of_stage(self, size: int) -> Tensor | None:
        """Return the input of graphs of a size; None at the first stage."""
        return None if self._stage_input is None else self._stage_input[: self._model.stream_rows(size)]

    def _forward(self, put: dict[str, Tensor], stage_input: Tensor | None, q_start: Tensor, max_kv: int) -> Tensor:
        state, size = self._state, len(put["slots"])
        inputs = self._backend.decode_rows(put["slots"], state.columns)
        batch = AttentionBatch(
            page_table=state.columns.page_table,
            slots=put["slots"],
            q_start=q_start,
            kv_len=inputs.kv_len,
            kv_start=put["kv_start"],
            num_decode=size,
            max_q=1,
            max_kv=max_kv,
            levels=(step_tensors.cascade_level(put, 0, size, max_kv),) if "start_0" in put else (),
        )
        x_T = inputs.token if stage_input is None else stage_input
        hidden: Tensor = self._model(
            *(x_T, inputs.position, inputs.kv_index, state.caches, batch, None), reader=self._reader
        )
        return hidden

    def _sample(self, put: dict[str, Tensor], hidden: Tensor) -> Tensor:
        state = self._state
        batch = replace(sampling_batch(state, put["slots"]), shards=self._model.shards)
        sampled = self._backend.sample(self._model.logits(hidden), batch)
        return self._backend.record_sampled_tokens(put["slots"], sampled.token, sampled.logprob, state.columns)


NO_SAMPLED_TOKENS = torch.empty((2, 0), dtype=torch.int32)
"""Sampled tokens of a stage that is not the last: none."""


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


def graph_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows to capture: 1, 2, 4, then multiples of 8, eight per doubling, and `max_rows` itself.

    >>> graph_sizes(200)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 200]
    """
    found = [size for size in (1, 2, 4) if size < max_rows]
    size = 8
    while size < max_rows:
        found.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 8)
    return [*found, max_rows]


def total_graph_rows(max_rows: int) -> int:
    """Return the total rows of all graphs up to `max_rows`: each graph keeps its hidden states and sampled tokens."""
    return sum(size * (4 if size <= FINE_GRAPH_ROWS else 2) for size in graph_sizes(max_rows))


def _group_count(size: int, grouped: bool) -> int:
    return min(MAX_GRAPH_GROUPS, size // 2) if grouped else 0


def _arrays(step: StepInput | None, size: int, groups: int, padding: int) -> dict[str, np.ndarray]:
    """Return slots, `kv_start` and groups of a step, padded to the size; step None: padding only."""
    slots, start = np.full(size, padding, np.int32), np.zeros(size, np.int32)
    if step is not None:
        count = len(step.decode_slot)
        slots[:count] = step.decode_slot
        start[:count] = step_tensors.own_start(step)
    level = step.levels[0] if step is not None and step.levels else None
    return {"slots": slots, "kv_start": start} | (step_tensors.groups(0, level, groups) if groups else {})
