"""Compute a mixture of experts in plain torch, one expert after the other.

Axes: T tokens, E experts, C experts of a token, P = T × C pairs of a token and one of its experts, N hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tok_kernels.linear import invariant
from tok_kernels.linear.reference import gated_linear, linear
from tok_kernels.moe.interface import ExpertCopies, ExpertWeights, Routing

Multiply = Callable[[Tensor, Tensor], Tensor]
"""Function that multiplies rows by a dense weight."""


def select_experts(
    logits_TE: Tensor,
    top_k: int,
    *,
    normalize: bool,
    copies: ExpertCopies | None = None,
    length_D: Tensor | None = None,
) -> Routing:
    """Compute `Backend.select_experts`."""
    logits_TE = logits_TE.float()
    expert_TC = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weight_TC = logits_TE.softmax(-1).gather(1, expert_TC)
    if normalize:
        weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
    expert_TC = expert_TC.int() if copies is None else copies.slots_of(expert_TC)
    if length_D is not None:
        expert_TC[: len(length_D)].masked_fill_(length_D.unsqueeze(1) == 0, -1)
    return Routing(expert_TC, weight_TC, logits_TE.shape[1] if copies is None else copies.slots)


def fused_experts(
    x_TN: Tensor, routing: Routing, weights: ExpertWeights, *, residual_TN: Tensor | None = None
) -> Tensor:
    """Compute `Backend.fused_experts`. On a GPU the host waits for the token counts of the experts."""
    return _expert_by_expert(x_TN, routing, weights, residual_TN, gated_linear, linear)


def invariant_fused_experts(
    x_TN: Tensor, routing: Routing, weights: ExpertWeights, *, residual_TN: Tensor | None = None
) -> Tensor:
    """Compute `Backend.fused_experts` batch-invariantly on a CPU: a token's bits do not depend on other tokens."""
    return _expert_by_expert(x_TN, routing, weights, residual_TN, invariant.gated_linear, invariant.linear)


def _expert_by_expert(
    x_TN: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    residual_TN: Tensor | None,
    gated: Multiply,
    multiply: Multiply,
) -> Tensor:
    """Compute `Backend.fused_experts`; `gated` multiplies by gate_up weights, and `multiply` by down weights."""
    expert_P = routing.expert_TC.flatten().long()
    pair_P = expert_P.argsort(stable=True)
    padding, *counts = torch.bincount(expert_P + 1, minlength=routing.experts + 1).tolist()
    top_k, local = routing.expert_TC.shape[1], weights.local_range(routing.experts)
    y_PN = x_TN.new_zeros((len(expert_P), x_TN.shape[1]))
    for expert, pairs in enumerate(torch.split(pair_P[padding:], counts)):
        if len(pairs) and expert in local:
            gate_up, down = weights.dense(expert, routing.experts, x_TN.dtype)
            y_PN[pairs] = multiply(gated(x_TN[pairs // top_k], gate_up), down)
    sum_TN = torch.zeros_like(x_TN, dtype=torch.float32)
    for y_TN, weight_T in zip(
        torch.unflatten(y_PN, 0, (-1, top_k)).unbind(1), routing.weight_TC.unbind(1), strict=True
    ):
        sum_TN += weight_T.unsqueeze(1) * y_TN
    if residual_TN is None:
        return sum_TN.to(x_TN.dtype)
    return residual_TN.copy_(sum_TN + residual_TN)
