"""Let engines on a CPU replay decode steps as a GPU does: padded to a graph's size, from arrays at fixed addresses.

A replay computes a part of the step again, as it was captured, and writes its results where the first ones are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tok_core.messages import StepInput
from tok_core.worker import cuda_graphs
from tok_core.worker.cuda_graphs import DecodeGraph, DecodeGraphs, GraphKey, padded_arrays
from tok_core.worker.staging import OutputStaging, Staging


def replaying(run: Callable[[], None]) -> Any:
    """Return a stand-in for a CUDA graph, whose replay calls `run`."""
    return SimpleNamespace(replay=run)


def forms(arrays: dict[str, np.ndarray]) -> list[tuple[object, ...]]:
    return [(name, array.shape, array.dtype) for name, array in arrays.items()]


def replay_decode_steps(patch: pytest.MonkeyPatch) -> list[GraphKey]:
    """Make engines that start from now on replay decode steps; return the list of graphs that are captured then."""
    captured, first_arrays = list[GraphKey](), list[dict[str, np.ndarray]]()
    original_init, original_arrays = DecodeGraphs.__init__, DecodeGraph.arrays

    def start(self: DecodeGraphs, *args: Any, **options: Any) -> None:
        original_init(self, *args, **options)
        self._sizes = cuda_graphs.graph_sizes(self._state.slots)

    def capture(self: DecodeGraphs, key: GraphKey) -> float:
        captured.append(key)
        staged, q_start = self._padding_inputs(key)
        draft_kn = self._draft(staged)
        hidden, rows = self._forward(key, staged, q_start)
        sampled, advanced = self._sample(staged, hidden, rows), self._advance(staged, draft_kn)

        def forward() -> None:
            drafted = self._draft(staged)
            if draft_kn is not None and drafted is not None:
                draft_kn.copy_(drafted)
            new_hidden, new_rows = self._forward(key, staged, q_start)
            hidden.copy_(new_hidden)
            for field in fields(rows):
                getattr(rows, field.name).copy_(getattr(new_rows, field.name))

        def sample() -> None:
            sampled.copy_(self._sample(staged, hidden, rows))

        def advance() -> None:
            advanced.copy_(self._advance(staged, draft_kn))

        self._graphs[key] = DecodeGraph(
            key=key,
            padding_slot=self._state.slots,
            max_pack_rows=self._max_pack_rows,
            max_draft_tokens=self._state.max_draft_tokens,
            forward=replaying(forward),
            stage_input=None,
            hidden=hidden,
            sample_graph=replaying(sample),
            sampled_tokens=sampled,
            advance_graph=None if self._drafter is None else replaying(advance),
            advanced=advanced,
            inputs=(q_start, rows, draft_kn),
        )
        return 0.0

    def arrays(self: DecodeGraph, step: StepInput) -> dict[str, np.ndarray]:
        made = original_arrays(self, step)
        padding = padded_arrays(None, self.key, self.padding_slot, self.max_pack_rows, self.max_draft_tokens)
        assert forms(made) == forms(padding)
        first_arrays.append(made)
        return made

    def put(self: Staging, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        buffers = self.__dict__.setdefault("buffers", {})
        if first_arrays:  # a graph reads them by address
            wanted = first_arrays.pop()
            assert all(arrays[name] is array for name, array in wanted.items())
            assert list(arrays)[: len(wanted)] == list(wanted)
        tensors = {}
        for name, array in arrays.items():
            made = torch.from_numpy(array.copy())
            tensors[name] = buffers.setdefault((name, made.shape, made.dtype), made)
            tensors[name].copy_(made)
        return tensors

    patch.setattr(DecodeGraphs, "__init__", start)
    patch.setattr(DecodeGraph, "arrays", arrays)
    patch.setattr(DecodeGraphs, "_capture", torch.inference_mode()(capture))
    patch.setattr(DecodeGraphs, "_uncaptured", property(lambda self: {}, lambda self, value: None), raising=False)
    patch.setattr(Staging, "put", put)
    patch.setattr(OutputStaging, "copy_to_host", lambda self, x: x.clone())  # the next replay overwrites x
    patch.setattr("tok_core.worker.ngram_drafts.copy_to_host", torch.clone)
    return captured
