"""Rebalance experts (EPLB): move experts and their copies between ranks, so that each computes as many tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from tok_core.models.decoder import CausalLM
from tok_core.models.experts import DOWN, GATE_UP, ExpertLoad, MixtureOfExperts, mixtures_of, zero_counts
from tok_core.models.layers import Linear
from tok_core.parallel import ExpertPlacement, TensorParallel
from tok_core.runtime import HEARTBEAT

log = logging.getLogger("tok_core")

MIN_MEAN_TOKENS = 32  # mean tokens per expert; with fewer, differences are mostly chance
MIN_GAIN = 0.05  # minimum fall of the busiest rank's load, as a share of the mean load
MAX_GATHERED_BYTES = 1 << 28  # bytes of the buffer that gathers matrices of all ranks


@torch.inference_mode()
def rebalance(model: CausalLM, load: ExpertLoad | None) -> None:
    """Place experts by the tokens counted in `load` since the last call, and reset it.

    Only rank 0 of the stage passes a load. All ranks of the stage call this together, while no step is in flight. With
    too few tokens (MIN_MEAN_TOKENS) nothing changes.
    """
    tensor, mixtures = model.tensor, mixtures_of(model)
    if tensor is None or not mixtures:
        return
    own_LS = zero_counts(mixtures, torch.int64) if load is None else load.total_LS
    counts = tensor.gather(own_LS)[0].tolist()
    experts = mixtures[0].gate.parts["gate"].size
    if sum(counts[0]) < MIN_MEAN_TOKENS * experts:
        return
    if load is not None:
        load.total_LS.zero_()
    before = after = 0.0
    for mixture, count_S in zip(mixtures, counts, strict=True):
        HEARTBEAT.turned()
        load_E = [0.0] * experts
        for expert, count in zip(mixture.placement.expert_S, count_S, strict=True):
            load_E[expert] += count
        old, new = mixture.placement, ExpertPlacement.balanced(load_E, len(count_S), tensor.ranks)
        before += old.imbalance(load_E)
        if old.imbalance(load_E) - new.imbalance(load_E) > MIN_GAIN:
            _move(mixture, new, tensor)
        after += mixture.placement.imbalance(load_E)
    if tensor.rank == 0 and after < before:
        text = "experts moved: the tokens of the busiest rank, divided by the mean of the ranks, fall from %.2f to %.2f"
        log.info(text, before / len(mixtures), after / len(mixtures))


def _move(mixture: MixtureOfExperts, new: ExpertPlacement, tensor: TensorParallel) -> None:
    old = mixture.placement
    source_S = [old.expert_S.index(expert) for expert in new.of_rank(tensor.rank)]
    for linear, names in ((mixture.gate_up_proj, GATE_UP), (mixture.down_proj, (DOWN,))):
        for name in names:
            _exchange(linear, name, mixture.local_experts, source_S, tensor)
    mixture.place(new)


def _exchange(linear: Linear, name: str, experts: Sequence[int], source_S: list[int], tensor: TensorParallel) -> None:
    """Replace the matrices `name` of this rank's experts by those of the slots `source_S`, in their stored format.

    Rows of all ranks' matrices are gathered block by block, before any rank overwrites the block.
    """
    views = {own: target.view for own, target in linear.method.targets(linear)}
    starts = [f"experts.{expert}.{name}." for expert in experts]
    for end in [own.removeprefix(starts[0]) for own in views if own.startswith(starts[0])]:
        own_S = [views[f"{start}{end}"] for start in starts]
        row_bytes = own_S[0][0].numel() * own_S[0].itemsize
        rows = max(1, MAX_GATHERED_BYTES // (row_bytes * len(starts) * tensor.ranks))
        for start in range(0, len(own_S[0]), rows):
            block = slice(start, start + rows)
            for view, gathered in zip(own_S, _gathered([view[block] for view in own_S], tensor)[source_S], strict=True):
                view[block] = gathered


def _gathered(blocks: list[Tensor], tensor: TensorParallel) -> Tensor:
    """Return the blocks of all ranks' slots. They are sent as bytes, since collectives lack some dtypes."""
    own = torch.stack(blocks)
    return tensor.gather_rows(own.view(torch.uint8)).view(own.dtype)
