"""Implement a mixture of experts as a layer's feed-forward half, whole or as one tensor-parallel rank's shard.

Axes: T tokens of the step, N hidden size, E experts (that the rank holds), F intermediate size of an expert (the rank's
own part).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tok_core.model_config import ModelConfig
from tok_core.models.layers import MLP, FeedForward, Linear, Placement, RMSNorm
from tok_core.parallel import Slice, TPLayout
from tok_core.quantization import StackedTarget
from tok_kernels import ExpertWeights

PASSES_PER_COUNT = 64  # forward passes for one whose experts' tokens are counted, by one more kernel for each layer


class ExpertLoad:
    """Counts the tokens of each expert in some forward passes of a stage, without waiting for the device."""

    def __init__(self, model: nn.Module) -> None:
        self._mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        self._passes = 0
        self._count_LE: Tensor | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of the forward pass that runs in this context, if it is one to count."""
        self._passes += 1
        if not self._mixtures or self._passes % PASSES_PER_COUNT != 1:
            yield
            return
        first = self._mixtures[0]
        size = len(self._mixtures), first.experts.size
        self._count_LE = torch.zeros(size, dtype=torch.int32, device=next(first.parameters()).device)
        for mixture, count_E in zip(self._mixtures, self._count_LE, strict=True):
            mixture.count_E = count_E
        try:
            yield
        finally:
            for mixture in self._mixtures:
                mixture.count_E = None

    def take(self) -> Tensor | None:
        """Return the tokens of each expert in the last forward pass, int32 `[layers, E]`; None: it was not counted."""
        count_LE, self._count_LE = self._count_LE, None
        return count_LE


class MixtureOfExperts(FeedForward):
    """Each token's most likely experts, weighted by the router (Shazeer et al. 2017; Fedus et al. 2022).

    Every expert is a SwiGLU MLP. Ranks hold some columns of each expert, or with expert parallelism some experts
    (Lepikhin et al. 2021): each computes its part of all tokens' results, and the layout sums them. The matrices of a
    rank's experts are stacked in one `Linear`, so that weight formats store, load and shard them as those of other
    layers.
    """

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "the model has no experts"
        self.chosen, self.normalize = moe.experts_per_token, moe.normalize
        self.backend = placement.backend
        self.count_E: Tensor | None = None  # `ExpertLoad`
        hidden, own = Slice.whole(config.hidden_size), placement.shard_plan.expert_columns
        self.experts = placement.shard_plan.experts
        held = range(self.experts.start, self.experts.stop)
        self.held = None if self.experts.is_whole else held
        self.gate = Linear(hidden, {"gate": Slice.whole(moe.experts)}, placement)
        parts = [f"experts.{expert}.{name}" for expert in held for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = Linear(hidden, dict.fromkeys(parts, own), placement)
        parts = [f"experts.{expert}.down_proj" for expert in held]
        self.down_proj = Linear(own, dict.fromkeys(parts, hidden), placement)
        self.shared_expert: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        if moe.shared_intermediate_size:
            columns = placement.shard_plan.part(moe.shared_intermediate_size)
            self.shared_expert = MLP(config, placement.within("shared_expert"), bias=False, columns=columns)
            self.shared_expert_gate = Linear(hidden, {"shared_expert_gate": Slice.whole(1)}, placement)

    def stacked_targets(self) -> Iterator[tuple[str, StackedTarget]]:
        """Yield the names of tensors that hold a matrix of all experts, in place of one for each, and what each fills.

        "experts.gate_up_proj" is `[E, 2F, N]`, and "experts.down_proj" `[E, N, F]`, both of all ranks' experts.
        """
        for name, linear in (("gate_up_proj", self.gate_up_proj), ("down_proj", self.down_proj)):
            targets = dict(linear.targets())
            if all(end.endswith(".weight") and len(target.shape) == 2 for end, target in targets.items()):
                yield f"experts.{name}", StackedTarget.of(targets, self.experts)

    def forward(self, x_TN: Tensor, norm: RMSNorm, layout: TPLayout | None = None) -> Tensor:
        normed_TN = norm(x_TN) if layout is None else layout.gather(x_TN, norm)
        routing = self.backend.select_experts(self.gate(normed_TN), self.chosen, normalize=self.normalize)
        if self.count_E is not None:
            expert_P = routing.expert_TC.flatten()
            self.count_E.index_add_(0, expert_P, self.count_E.new_ones(1).expand(len(expert_P)))
        gate_up, down = (one.method.operand(one) for one in (self.gate_up_proj, self.down_proj))
        weights = ExpertWeights(gate_up, down, self.held)
        residual_TN = x_TN if layout is None else None
        out_TN = self.backend.fused_experts(normed_TN, routing, weights, residual_TN=residual_TN)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            # torch's sigmoid is less precise at a tensor's end than elsewhere; exp is not.
            share_T1 = 1.0 / (1.0 + torch.exp(-self.shared_expert_gate(normed_TN).float()))
            out_TN += (share_T1 * self.shared_expert.result(normed_TN)).to(out_TN.dtype)
        return out_TN if layout is None else layout.add(out_TN, x_TN)
