"""Move experts between the ranks of a model, and report what that changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from support.parallel_models import CPU, greedy, model_of
from tok_core.models import CausalLM, ExpertLoad, build, load_checkpoint, rebalance
from tok_core.models.experts import mixtures_of
from tok_core.parallel import ProcessGroups, TensorParallel
from tok_core.quantization import QuantizationConfig
from tok_kernels import choose


def counted(model: CausalLM, prompt: Sequence[int]) -> ExpertLoad:
    """Run the model on a prompt, and return the tokens of its slots."""
    load = ExpertLoad(model)
    with load.counting():
        greedy(model, prompt, 1)
    load.take()
    return load


def moved_greedy(
    peers: ProcessGroups, models: Sequence[tuple[Path, QuantizationConfig]], prompt: Sequence[int], count: int
) -> list[tuple[list[int], list[int], float, float, bool]]:
    """Return each model's greedy tokens before and after experts move, the imbalances, and whether experts moved.

    Parameters of the moved model are those of one that is loaded with the experts in their new slots.
    """
    assert peers.tensor is not None
    tensor, found = TensorParallel(peers.tensor, CPU), []
    for path, quantization in models:
        model = model_of(path, peers.coordinates, tensor, quantization=quantization)
        before, tokens = greedy(model, prompt, count), counted(model, prompt)
        placements = [one.placement for one in mixtures_of(model)]
        first = imbalance(tokens)
        rebalance(model, tokens if peers.coordinates.rank == 0 else None)
        moved = [one.placement for one in mixtures_of(model)] != placements
        after = greedy(model, prompt, count)
        twin = build(model.config, choose(CPU), CPU, torch.float32, peers.coordinates, tensor, quantization)
        for one, other in zip(mixtures_of(twin), mixtures_of(model), strict=True):
            one.place(other.placement)
        load_checkpoint(twin, path)
        expected = dict(twin.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.view(torch.uint8), expected[name].view(torch.uint8)), name
        found.append((before, after, first, imbalance(counted(model, prompt)), moved))
    return found


def imbalance(tokens: ExpertLoad) -> float:
    """Return the tokens of the rank with most over those of a mean one, summed over the layers."""
    of_ranks = torch.unflatten(tokens.total_LS, 1, (2, -1)).sum(2).double()
    return float((of_ranks.max(1).values / of_ranks.mean(1)).sum())
