"""Decode steps captured once per size as CUDA graphs and replayed with one launch.

A graph's kernels run over fixed tensors in fixed numbers. A step is computed by the smallest graph that holds it: what
is left of its rows belongs to the slot that never holds a sequence, what is left of its groups to no row. Lengths are
found on the device, so that one graph serves them all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tok_core.mesh import RankCoordinates
from tok_core.messages import StepInput
from tok_core.models import CausalLM
from tok_core.runtime import HEARTBEAT
from tok_core.worker import step_tensors
from tok_core.worker.staging import Staging
from tok_core.worker.state import WorkerState
from tok_kernels import AttentionBatch, Backend, SamplingBatch

MAX_GRAPH_GROUPS = 256  # a graph has room for; steps with more, or with nested ones, are launched kernel by kernel
# Few rows of long contexts are best computed in another way than few of short ones, which a graph must settle.
FINE_GRAPH_ROWS = 512
SHORT_KV_TOKENS = 2048  # tokens


class GraphKey(NamedTuple):
    """What the graphs of one size differ in: whether there are prefix groups, and whether contexts may be long."""

    groups: bool
    long: bool


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One size: `rows` decode rows in at most `groups` prefix groups.

    forward  from slots, and from the `inflow` of a stage before, to `hidden`: `[rows, N]`, or what the stage hands on
    draw     at the last stage: from `hidden` to `drawn`, int32 `[2, rows]`: tokens and log-probabilities' bits
    """

    rows: int
    groups: int
    padding: int
    forward: torch.cuda.CUDAGraph
    inflow: Tensor | None
    hidden: Tensor
    draw: torch.cuda.CUDAGraph | None
    drawn: Tensor
    inputs: tuple[Tensor, ...]  # held, because the graphs read them

    def arrays(self, step: StepInput) -> dict[str, np.ndarray]:
        """The step's host arrays at this size; they are to be put first, where the graph will look for them."""
        return _arrays(step, self.rows, self.groups, self.padding)

    @staticmethod
    def draws(step: StepInput) -> bool:
        """Whether `sample_tokens` does all that the step's rows ask for."""
        asking = step.filter_row, step.penalty_row, step.bias_row, step.mask_row
        return not (step.top_logprobs or any(map(len, asking)))


class DecodeGraphs:
    """The graphs of one model, by size and kind; none until `capture`."""

    def __init__(
        self, model: CausalLM, backend: Backend, state: WorkerState, staging: Staging, place: RankCoordinates
    ) -> None:
        self._model = model
        self._backend = backend
        self._state = state
        self._staging = staging
        self._place = place
        self._inflow: Tensor | None = None  # of all graphs, since no two of them run at a time
        self._sizes: list[int] = []
        self._graphs: dict[tuple[int, GraphKey], DecodeGraph] = {}

    def __len__(self) -> int:
        return len({id(graph) for graph in self._graphs.values()})

    def find(self, step: StepInput) -> DecodeGraph | None:
        """The graph for a step; None for one with prompts, for one with nested groups, and for one too large."""
        count, groups = len(step.decode_slot), len(step.levels[0].start) if step.levels else 0
        if len(step.prefill_slot) or len(step.levels) > 1 or not self._sizes or count > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        graph = self._graphs[size, GraphKey(groups > 0, step.max_kv > SHORT_KV_TOKENS)]  # a single row is in no group
        return graph if groups <= graph.groups else None

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int]) -> None:
        """Records the sizes, largest first, so that smaller ones find room in the memory of larger ones."""
        recorder, longest, largest_first = _Recorder(self._state.device), self._state.max_len, sorted(sizes)[::-1]
        if not self._place.first:
            self._inflow = self._make_inflow(largest_first)
        for size in largest_first:
            differs = size <= FINE_GRAPH_ROWS and longest > SHORT_KV_TOKENS
            for groups in (False, True) if size > 1 else (False,):
                long = self._capture(size, groups, longest, recorder)
                short = self._capture(size, groups, SHORT_KV_TOKENS, recorder) if differs else long
                self._graphs |= {(size, GraphKey(groups, True)): long, (size, GraphKey(groups, False)): short}
        self._sizes = sorted({size for size, _ in self._graphs})

    def _capture(self, size: int, grouped: bool, max_kv: int, recorder: _Recorder) -> DecodeGraph:
        HEARTBEAT.turned()
        padding, groups = self._state.slots, min(MAX_GRAPH_GROUPS, size // 2) if grouped else 0
        put = self._staging.put(_arrays(None, size, groups, padding))
        q_start = torch.arange(size + 1, dtype=torch.int32, device=self._state.device)
        inflow = None if self._inflow is None else self._inflow[: self._model.stream_rows(size)]
        hidden = self._forward(put, inflow, q_start, max_kv)  # compiles, and lets libraries set themselves up
        drawn = self._draw(put, hidden) if self._place.last else NOTHING
        torch.cuda.synchronize(self._state.device)
        with recorder.recording() as forward:
            hidden = self._forward(put, inflow, q_start, max_kv)
        draw = None
        if self._place.last:
            with recorder.recording() as draw:
                drawn = self._draw(put, hidden)
        return DecodeGraph(size, groups, padding, forward, inflow, hidden, draw, drawn, (q_start,))

    def _make_inflow(self, sizes: Iterable[int]) -> Tensor:
        """Room for the stream of each size, `[rows, N]`; zeros, because what is recorded is tried before."""
        rows = max(self._model.stream_rows(size) for size in sizes)
        return torch.zeros((rows, self._model.config.hidden_size), dtype=self._model.dtype, device=self._state.device)

    def _forward(self, put: dict[str, Tensor], inflow: Tensor | None, q_start: Tensor, max_kv: int) -> Tensor:
        state, size = self._state, len(put["slots"])
        made = self._backend.decode_rows(put["slots"], state.columns)
        batch = AttentionBatch(
            page_table=state.columns.page_table,
            slots=put["slots"],
            q_start=q_start,
            kv_len=made.kv_len,
            kv_start=put["kv_start"],
            num_decode=size,
            max_q=1,
            max_kv=max_kv,
            levels=(step_tensors.cascade_level(put, 0, size, max_kv),) if "start_0" in put else (),
        )
        x_T = made.token if inflow is None else inflow
        hidden: Tensor = self._model(x_T, made.position, made.kv_index, state.caches, batch, None)
        return hidden

    def _draw(self, put: dict[str, Tensor], hidden: Tensor) -> Tensor:
        state, slot = self._state, put["slots"].long()
        batch = SamplingBatch(
            temperature=state.temperature[slot],
            seed=state.seed[slot],
            sample=state.sample[slot],
            position=state.columns.length[slot],
            shards=self._model.shards,
        )
        sampled = self._backend.sample(self._model.logits(hidden), batch)
        return self._backend.record_draws(put["slots"], sampled.token, sampled.logprob, state.columns)


NOTHING = torch.empty((2, 0), dtype=torch.int32)
"""What a stage draws that is not the last."""


class _Recorder:
    """Makes graphs of what is launched; all share one pool of memory, since no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Unlike torch's own context this one leaves the allocator's other blocks alone."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()


def sizes(most: int) -> list[int]:
    """Numbers of rows worth a graph each: 1, 2, 4, then multiples of 8, eight to each doubling, and `most` itself.

    >>> sizes(200)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 200]
    """
    found = [size for size in (1, 2, 4) if size < most]
    size = 8
    while size < most:
        found.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 8)
    return [*found, most]


def kept_rows(most: int) -> int:
    """Rows of all graphs for up to `most`, together: each graph keeps its hidden states and draws."""
    return sum(size * (4 if size <= FINE_GRAPH_ROWS else 2) for size in sizes(most))


def _arrays(step: StepInput | None, size: int, groups: int, padding: int) -> dict[str, np.ndarray]:
    """Slots, own starts and groups of a step, filled up to the size; all padding without a step."""
    slots, start = np.full(size, padding, np.int32), np.zeros(size, np.int32)
    if step is not None:
        count = len(step.decode_slot)
        slots[:count] = step.decode_slot
        start[:count] = step_tensors.own_start(step)
    level = step.levels[0] if step is not None and step.levels else None
    return {"slots": slots, "kv_start": start} | (step_tensors.groups(0, level, groups) if groups else {})
