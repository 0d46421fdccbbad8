"""Implement a mixture of experts as a layer's feed-forward half, whole or as one tensor-parallel rank's shard.

Axes: T tokens of the step, N hidden size, E experts, S slots of all ranks for experts and copies, F intermediate size
of an expert (the rank's own part).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tok_core.model_config import ModelConfig
from tok_core.models.layers import MLP, FeedForward, Linear, Placement, RMSNorm
from tok_core.parallel import ExpertPlacement, Slice, TPLayout
from tok_core.quantization import StackedTarget
from tok_kernels import AttentionBatch, ExpertCopies, ExpertWeights

GATE_UP, DOWN = ("gate_proj", "up_proj"), "down_proj"  # matrices of an expert
PASSES_PER_COUNT = 64  # forward passes; one of them counts tokens, which takes another kernel per layer


class ExpertLoad:
    """Counts the tokens of each slot in one of PASSES_PER_COUNT forward passes of a stage, without a device sync.

    total_LS  int64 `[layers, S]`: tokens counted since the last rebalancing
    """

    def __init__(self, model: nn.Module) -> None:
        self._mixtures = mixtures_of(model)
        self._passes = 0
        self._count_LS: Tensor | None = None
        self.total_LS = zero_counts(self._mixtures, torch.int64)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of the forward pass in this context, if it is the pass that counts."""
        self._passes += 1
        if not self._mixtures or self._passes % PASSES_PER_COUNT != 1:
            yield
            return
        self._count_LS = zero_counts(self._mixtures, torch.int32)
        for mixture, count_S in zip(self._mixtures, self._count_LS, strict=True):
            mixture.count_S = count_S
        try:
            yield
        finally:
            for mixture in self._mixtures:
                mixture.count_S = None

    def take(self) -> Tensor | None:
        """Return the tokens of each slot in the last forward pass, int32 `[layers, S]`; None if it did not count."""
        count_LS, self._count_LS = self._count_LS, None
        if count_LS is not None:
            self.total_LS += count_LS
        return count_LS

    def slot_expert(self) -> np.ndarray | None:
        """Return the expert of each slot now, int32 `[layers, S]`; None if no expert has copies."""
        if all(mixture.copies is None for mixture in self._mixtures):
            return None
        return np.array([mixture.placement.expert_S for mixture in self._mixtures], np.int32)


class MixtureOfExperts(FeedForward):
    """Each token's most likely experts, weighted by the router (Shazeer et al. 2017; Fedus et al. 2022).

    Every expert is a SwiGLU MLP. A rank holds some columns of each expert, or with expert parallelism some experts
    (Lepikhin et al. 2021). It computes its part of all tokens' results, and the layout sums the parts. The matrices of
    a rank's experts are stacked in one `Linear`, so weight formats store, load and shard them like other layers.

    placement  the expert of each slot of all ranks; this rank has `local_slots` (None: all)
    copies     the placement on the device, if some experts have copies, whose ranks share the expert's tokens
    """

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "the model has no experts"
        self.top_k, self.normalize = moe.experts_per_token, moe.normalize
        self.backend = placement.backend
        self.count_S: Tensor | None = None  # tokens of each slot, while `ExpertLoad` counts
        hidden, own = Slice.whole(config.hidden_size), placement.shard_plan.expert_columns
        slots, coordinates = placement.shard_plan.expert_slots, placement.shard_plan.coordinates
        self.local_slots = None if slots.is_whole else range(slots.start, slots.stop)
        self.gate = Linear(hidden, {"gate": Slice.whole(moe.experts)}, placement)
        ranks = coordinates.ranks if coordinates.ep else 1
        self._rank = coordinates.rank if coordinates.ep else 0
        self.placement = ExpertPlacement.initial(moe.experts, slots.size, ranks)
        self.gate_up_proj = Linear(hidden, dict.fromkeys(self._parts(*GATE_UP), own), placement)
        self.down_proj = Linear(own, dict.fromkeys(self._parts(DOWN), hidden), placement)
        self.copies: ExpertCopies | None = None
        if coordinates.redundant_experts:
            for name in (*GATE_UP, DOWN):  # raises an error if a later placement would mix formats
                names = [f"{placement.prefix}experts.{expert}.{name}" for expert in range(moe.experts)]
                placement.quantization.method_of(names)
            slot_EK = torch.tensor(self.placement.copies(), dtype=torch.int32, device=placement.device)
            self.copies = ExpertCopies(slot_EK, slots.size)
        self.shared_expert: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        if moe.shared_intermediate_size:
            columns = placement.shard_plan.part(moe.shared_intermediate_size)
            self.shared_expert = MLP(config, placement.within("shared_expert"), bias=False, columns=columns)
            self.shared_expert_gate = Linear(hidden, {"shared_expert_gate": Slice.whole(1)}, placement)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Return the experts that this rank holds, in the order of their matrices."""
        return self.placement.of_rank(self._rank)

    def place(self, placement: ExpertPlacement) -> None:
        """Switch to another placement, after the matrices have moved. CUDA graphs stay valid."""
        assert self.copies is not None, "no expert has copies"
        self.placement = placement
        for linear, names in ((self.gate_up_proj, GATE_UP), (self.down_proj, (DOWN,))):
            linear.parts = dict.fromkeys(self._parts(*names), next(iter(linear.parts.values())))
        self.copies.slot_EK.copy_(torch.tensor(placement.copies(), dtype=torch.int32))

    def _parts(self, *names: str) -> list[str]:
        return [f"experts.{expert}.{name}" for expert in self.local_experts for name in names]

    def stacked_targets(self) -> Iterator[tuple[str, StackedTarget]]:
        """Yield the names and targets of checkpoint tensors that stack a matrix of all experts.

        "experts.gate_up_proj" is `[E, 2F, N]`, and "experts.down_proj" `[E, N, F]`, both of all ranks' experts.
        """
        for name, linear in (("gate_up_proj", self.gate_up_proj), ("down_proj", self.down_proj)):
            targets = dict(linear.targets())
            if all(end.endswith(".weight") and len(target.shape) == 2 for end, target in targets.items()):
                yield f"experts.{name}", StackedTarget.of(targets, self.local_experts, self.gate.parts["gate"].size)

    def forward(
        self, x_TN: Tensor, norm: RMSNorm, layout: TPLayout | None = None, batch: AttentionBatch | None = None
    ) -> Tensor:
        normed_TN = norm(x_TN) if layout is None else layout.gather(x_TN, norm)
        logits_TE = self.gate(normed_TN)
        routing = self.backend.select_experts(
            *(logits_TE, self.top_k),
            normalize=self.normalize,
            copies=self.copies,
            length_D=None if batch is None else batch.kv_len[: batch.num_decode],
        )
        if self.count_S is not None:
            slot_P = routing.expert_TC.flatten()
            self.count_S.index_add_(0, slot_P.clamp(min=0), (slot_P >= 0).int())
        gate_up, down = (one.method.operand(one) for one in (self.gate_up_proj, self.down_proj))
        weights = ExpertWeights(gate_up, down, self.local_slots)
        residual_TN = x_TN if layout is None else None
        out_TN = self.backend.fused_experts(normed_TN, routing, weights, residual_TN=residual_TN)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            # torch's sigmoid is less precise at a tensor's end than elsewhere; exp is not.
            share_T1 = 1.0 / (1.0 + torch.exp(-self.shared_expert_gate(normed_TN).float()))
            out_TN += (share_T1 * self.shared_expert.result(normed_TN)).to(out_TN.dtype)
        return out_TN if layout is None else layout.add(out_TN, x_TN)


def mixtures_of(model: nn.Module) -> list[MixtureOfExperts]:
    """Return the mixtures of experts of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def zero_counts(mixtures: list[MixtureOfExperts], dtype: torch.dtype) -> Tensor:
    """Return counts of the tokens of each slot, `[layers, S]`, all 0."""
    if not mixtures:
        return torch.zeros((0, 0), dtype=dtype)
    size = len(mixtures), len(mixtures[0].placement.expert_S)
    return torch.zeros(size, dtype=dtype, device=next(mixtures[0].parameters()).device)
