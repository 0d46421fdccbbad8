"""Capture passes of the draft model as CUDA graphs, once per number of rows, and replay them one after the other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from tok_core.runtime import HEARTBEAT
from tok_core.worker.cuda_graphs import SHORT_KV_TOKENS, GraphRecorder
from tok_core.worker.state import WorkerState

DRAFT_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows; padding is cheap, and the last bounds the logits' memory

Launch = Callable[[], None]
Advance = Callable[[Tensor, Tensor, int], None]
"""Runs a pass on slots, int32 `[R]`, and on tokens, positions and ends, int64 `[3, R]`, which it moves on in place."""


def record(launch: Launch, recorder: GraphRecorder) -> Launch:
    """Launch once, which compiles kernels, then capture; return the function that replays the graph."""
    HEARTBEAT.turned()
    launch()
    torch.cuda.synchronize(recorder.device)
    with recorder.recording() as graph:
        launch()
    return graph.replay


class DraftGraphs:
    """CUDA graphs of passes, by number of rows and for short or long contexts; empty until `capture`.

    Rows are read from fixed tensors, and moved on in them: the passes of a step follow one another without copies.
    Padding rows are at their end, so that they feed nothing.
    """

    def __init__(self, advance: Advance, state: WorkerState) -> None:
        self._advance = advance
        self._state = state
        self._sizes: list[int] = []
        self._graphs: dict[tuple[int, bool], Launch] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def size(self, rows: int) -> int | None:
        """Return the rows of the smallest graph with as many rows; None if there is none."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int], record: Callable[[Launch], Launch]) -> None:
        """Capture graphs of these sizes by `record`, largest first, so that smaller ones reuse their memory."""
        largest_first, longest = sorted(sizes)[::-1], self._state.max_len
        slots, device = self._state.slots, self._state.device
        self._slot_N = torch.full((largest_first[0],), slots, dtype=torch.int32, device=device)
        self._row_3N = torch.zeros((3, largest_first[0]), dtype=torch.int64, device=device)
        for size in largest_first:
            for long in (True, False) if longest > SHORT_KV_TOKENS else (False,):
                max_kv = longest if long else min(longest, SHORT_KV_TOKENS)
                launch = partial(self._advance, self._slot_N[:size], self._row_3N[:, :size], max_kv)
                self._graphs[size, long] = record(launch)
        self._sizes = largest_first[::-1]

    def load(self, put: Mapping[str, Tensor]) -> None:
        """Copy the rows of a step's first pass, padded to the size of a graph, to where the graphs read them."""
        size = len(put["draft_slot"])
        self._slot_N[:size] = put["draft_slot"]
        self._row_3N[:, :size] = put["draft_row"]

    def replay(self, rows: int, max_kv: int) -> Tensor:
        """Run a pass of the first `rows` rows; return the tensor of the tokens sampled, which the next pass changes."""
        size = self.size(rows)
        assert size is not None
        self._graphs[size, max_kv > SHORT_KV_TOKENS]()
        return self._row_3N[0]
