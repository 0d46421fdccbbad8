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
Advance = Callable[[Tensor, Tensor, Tensor | None, int], None]
"""Runs a pass on slots, int32 `[R]`, and moves on in place: tokens, positions and ends, int64 `[3, R]`, and the hidden
states of a draft head, `[R, N]`."""


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
    Padding rows are at their end, so that they feed nothing. `hidden_size` is that of a draft head; 0: no hidden states
    are moved on.
    """

    def __init__(self, advance: Advance, state: WorkerState, hidden_size: int, dtype: torch.dtype) -> None:
        self._advance = advance
        self._state = state
        self._hidden_size, self._dtype = hidden_size, dtype
        self._hidden_NH: Tensor | None = None
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
        if self._hidden_size:
            shape = largest_first[0], self._hidden_size
            self._hidden_NH = torch.zeros(shape, dtype=self._dtype, device=device)
        for size in largest_first:
            hidden = None if self._hidden_NH is None else self._hidden_NH[:size]
            for long in (True, False) if longest > SHORT_KV_TOKENS else (False,):
                max_kv = longest if long else min(longest, SHORT_KV_TOKENS)
                launch = partial(self._advance, self._slot_N[:size], self._row_3N[:, :size], hidden, max_kv)
                self._graphs[size, long] = record(launch)
        self._sizes = largest_first[::-1]

    def load(self, put: Mapping[str, Tensor], hidden: Tensor | None) -> None:
        """Copy the rows of a step's first pass, padded to the size of a graph, to where the graphs read them."""
        size = len(put["draft_slot"])
        if hidden is not None:
            assert self._hidden_NH is not None
            self._hidden_NH[:size] = hidden
        self._slot_N[:size] = put["draft_slot"]
        self._row_3N[:, :size] = put["draft_row"]

    def replay(self, rows: int, max_kv: int) -> Tensor:
        """Run a pass of the first `rows` rows; return the tensor of the tokens sampled, which the next pass changes."""
        size = self.size(rows)
        assert size is not None
        self._graphs[size, max_kv > SHORT_KV_TOKENS]()
        return self._row_3N[0]
