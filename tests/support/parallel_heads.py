"""Let ranks of a parallel model draft by an EAGLE-3 head; tests compare the results with those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from support.parallel_models import CPU, model_of, tokens_of
from tok_core import EngineConfig
from tok_core.config import RankCoordinates
from tok_core.models import load_checkpoint
from tok_core.parallel import ProcessGroups, TensorParallel
from tok_core.worker.draft_model import DraftModelRunner
from tok_core.worker.runner import Runner
from tok_core.worker.startup.draft import read_draft
from tok_core.worker.startup.dummy_steps import dummy_drafts, dummy_step
from tok_core.worker.state import WorkerState
from tok_kernels import choose


class RankDrafts(NamedTuple):
    """Two drafted tokens, the hidden states of the prompt, and the rank's keys and values of the head's rows."""

    drafted: list[int]
    hidden: NDArray[np.float32]
    kv: NDArray[np.float32]


def drafts_of_rank(
    peers: ProcessGroups, path: Path, heads: Sequence[Path], all_reduce_tokens: Sequence[int]
) -> list[list[RankDrafts]]:
    """Return what a rank drafts by each head, for each largest step with an all-reduce layout."""
    assert peers.tensor is not None
    tensor, found = TensorParallel(peers.tensor, peers.device), []
    for tokens in all_reduce_tokens:
        tensor.max_all_reduce_tokens = tokens
        found.append([drafts_after_prompt(path, head, peers.coordinates, tensor) for head in heads])
    return found


def drafts_after_prompt(
    path: Path, head: Path, coordinates: RankCoordinates = RankCoordinates(), tensor: TensorParallel | None = None
) -> RankDrafts:
    """Prefill a prompt of 37 tokens; then let the head read it by a chunk, and by a row of a pass, and draft."""
    tokens, backend = tokens_of(37), choose(CPU)
    target = model_of(path, coordinates, tensor)
    config = EngineConfig(model=str(path), draft=str(head), speculate=2, device="cpu")
    plan = read_draft(config, target.config, coordinates)
    assert plan is not None
    model = plan.build(backend, CPU, torch.float32, target, lambda directory, empty: load_checkpoint(empty, directory))
    state = WorkerState(target.local, CPU, torch.float32, slots=4, num_pages=16, page_size=4, pages_per_slot=16)
    state.columns.page_table[:] = torch.arange(16)
    draft_model = DraftModelRunner(model, backend, state, target.config.vocab_size)
    runner = Runner(target, backend, state, draft_model=draft_model)
    prompt = structs.replace(dummy_step(chunks=1, tokens=37), prefill_token=np.array(tokens, np.int32))
    (sampled,) = runner.launch(prompt).output().token.tolist()
    step = dummy_drafts(1, 35, 64)
    assert step.drafts is not None
    step.drafts = structs.replace(
        step.drafts,
        chunk_token=np.array(tokens[1:36], np.int32),
        slot=np.array([0, 0], np.int32),
        position=np.array([36, 35], np.int32),
        token=np.array([sampled, tokens[36]], np.int32),
        end=np.array([38, 36], np.int32),
        lent=np.array([[1, 2]], np.int32),
    )
    output = runner.launch(step).output()
    assert state.hidden is not None
    hidden, kv = state.hidden.flatten(0, 1)[:37], draft_model.kv.flatten(2, 3)[:, :, :38]
    return RankDrafts(output.draft_token[0].tolist(), hidden.numpy(), kv.numpy())
