"""Capture decode steps as CUDA graphs, once per size, and find the graph that replays a step.

A graph's kernels have fixed tensors and a fixed number of rows. A step runs on the smallest graph with enough rows.
Padding rows use the slot that never holds a sequence, and choose no experts; padding groups have no rows. Kernels read
lengths on the device, so that one graph serves all lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tok_core.config import RankCoordinates
from tok_core.messages import StepInput
from tok_core.models import CausalLM
from tok_core.runtime import HEARTBEAT
from tok_core.worker import step_tensors
from tok_core.worker.sampling import sampling_batch
from tok_core.worker.staging import Staging
from tok_core.worker.state import WorkerState
from tok_kernels import AttentionBatch, Backend

MAX_GRAPH_GROUPS = 256  # prefix groups; steps with more, or with nested groups, are launched kernel by kernel
# Graphs of few rows come in two variants, for short and for long contexts: the best kernel launch differs, and a graph
# fixes it.
FINE_GRAPH_ROWS = 512  # up to this many there are two variants
SHORT_KV_TOKENS = 2048  # longest context of the short variant


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

    `prefix_groups`: there are graphs of steps with prefix groups, too.
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
    ) -> None:
        self._model = model
        self._backend = backend
        self._state = state
        self._staging = staging
        self._coordinates = coordinates
        self._prefix_groups = prefix_groups
        self._stage_input: Tensor | None = None  # shared by all graphs, since only one of them runs at a time
        self._sizes: list[int] = []
        self._suspended = self._stale = False
        self._graphs: dict[tuple[int, GraphKey], DecodeGraph] = {}

    def __len__(self) -> int:
        return len({id(graph) for graph in self._graphs.values()})

    def find(self, step: StepInput) -> DecodeGraph | None:
        """Return the graph for a step; None for steps with prefill chunks or nested groups, and for too large ones."""
        count, groups = len(step.decode_slot), len(step.levels[0].start) if step.levels else 0
        if len(step.prefill_slot) or len(step.levels) > 1 or not self._sizes or count > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        graph = self._graphs.get((size, GraphKey(groups > 0, step.max_kv > SHORT_KV_TOKENS)))
        return graph if graph is not None and groups <= graph.groups else None

    @torch.inference_mode()
    def capture(self, graph_sizes: Iterable[int]) -> None:
        """Capture graphs of these sizes, largest first, so that smaller ones reuse the memory of larger ones."""
        recorder, largest_first = _Recorder(self._state.device), sorted(graph_sizes)[::-1]
        if not self._coordinates.first:
            self._stage_input = self._make_stage_input(largest_first)
        for size in largest_first:
            for groups in self._groupings(size):
                long, *short = (self._capture(size, groups, max_kv, recorder) for max_kv in self._max_kvs(size))
                self._graphs |= {
                    (size, GraphKey(groups, True)): long,
                    (size, GraphKey(groups, False)): short[0] if short else long,
                }
        self._sizes = sorted({size for size, _ in self._graphs})

    @torch.inference_mode()
    def launch(self, graph_sizes: Iterable[int]) -> None:
        """Launch what `capture` captures at the first and last stage, on any device."""
        for size in graph_sizes:
            for groups in self._groupings(size):
                for max_kv in self._max_kvs(size):
                    put, q_start = self._inputs(size, groups)
                    self._sample(put, self._forward(put, None, q_start, max_kv))

    def capture_again(self) -> None:
        """Capture all graphs again, once parameters of the model were replaced and no memory is released."""
        self._stale = self._suspended
        if self._stale:
            return
        sizes, self._sizes, self._graphs = self._sizes, [], {}
        if sizes:
            self.capture(sizes)

    def suspend(self, suspended: bool) -> None:
        """Take note whether weights or KV cache have no memory now, so that no graph can be captured."""
        self._suspended = suspended
        if self._stale:
            self.capture_again()

    def _capture(self, size: int, grouped: bool, max_kv: int, recorder: _Recorder) -> DecodeGraph:
        HEARTBEAT.turned()
        put, q_start = self._inputs(size, grouped)
        stage_input = None if self._stage_input is None else self._stage_input[: self._model.stream_rows(size)]
        hidden = self._forward(put, stage_input, q_start, max_kv)  # compiles kernels and initialises libraries
        sampled_tokens = self._sample(put, hidden) if self._coordinates.last else NO_SAMPLED_TOKENS
        torch.cuda.synchronize(self._state.device)
        with recorder.recording() as forward:
            hidden = self._forward(put, stage_input, q_start, max_kv)
        sample_graph = None
        if self._coordinates.last:
            with recorder.recording() as sample_graph:
                sampled_tokens = self._sample(put, hidden)
        padding, groups = self._state.slots, _group_count(size, grouped)
        return DecodeGraph(
            size, groups, padding, forward, stage_input, hidden, sample_graph, sampled_tokens, (q_start,)
        )

    def _groupings(self, size: int) -> tuple[bool, ...]:
        """Return whether graphs of a size are captured without and with prefix groups; a single row is in no group."""
        return (False, True) if self._prefix_groups and size > 1 else (False,)

    def _max_kvs(self, size: int) -> list[int]:
        """Return the bounds of a context's length for which graphs of a size are captured, the greatest first."""
        longest = self._state.max_len
        return [longest, SHORT_KV_TOKENS] if size <= FINE_GRAPH_ROWS and longest > SHORT_KV_TOKENS else [longest]

    def _inputs(self, size: int, grouped: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Return the arrays of a step of padding rows on the device, and its `q_start`."""
        put = self._staging.put(_arrays(None, size, _group_count(size, grouped), self._state.slots))
        return put, torch.arange(size + 1, dtype=torch.int32, device=self._state.device)

    def _make_stage_input(self, graph_sizes: Iterable[int]) -> Tensor:
        """Allocate the input of all sizes, `[rows, N]`; zeros, because steps run on it before their capture."""
        rows = max(self._model.stream_rows(size) for size in graph_sizes)
        return torch.zeros((rows, self._model.config.hidden_size), dtype=self._model.dtype, device=self._state.device)

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
        hidden: Tensor = self._model(x_T, inputs.position, inputs.kv_index, state.caches, batch, None)
        return hidden

    def _sample(self, put: dict[str, Tensor], hidden: Tensor) -> Tensor:
        state = self._state
        batch = replace(sampling_batch(state, put["slots"]), shards=self._model.shards)
        sampled = self._backend.sample(self._model.logits(hidden), batch)
        return self._backend.record_sampled_tokens(put["slots"], sampled.token, sampled.logprob, state.columns)


NO_SAMPLED_TOKENS = torch.empty((2, 0), dtype=torch.int32)
"""Sampled tokens of a stage that is not the last: none."""


class _Recorder:
    """Recorder of CUDA graphs that share a memory pool, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
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
