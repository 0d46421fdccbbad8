"""Compute a batch-invariant mixture of experts on a GPU: a token's bits do not depend on other tokens.

Every step has the same launch configuration. Tensor cores accumulate each row along the inputs in the same order,
whatever its index within a tile. A token's results are added in the order of its experts.
"""

from __future__ import annotations

from torch import Tensor

from tok_kernels.moe.interface import ExpertCopies, ExpertWeights, Routing
from tok_kernels.moe.triton import GroupedLaunch, fused_experts_with
from tok_kernels.moe.triton_route import SELECT_ELEMENTS, select_experts_with

# Tiles for steps of several hundred tokens. Smaller steps are bound by reading the weights, whatever the tile.
LAUNCH = GroupedLaunch(block_m=64, block_n=128, block_k=64, warps=4, stages=3)


def select_experts(
    logits_TE: Tensor,
    top_k: int,
    *,
    normalize: bool,
    copies: ExpertCopies | None = None,
    length_D: Tensor | None = None,
) -> Routing:
    """Compute `Backend.select_experts`. Raises ValueError for a top_k of more than the number of experts."""
    return select_experts_with(SELECT_ELEMENTS, logits_TE, top_k, normalize, copies, length_D)


def fused_experts(
    x_TN: Tensor, routing: Routing, weights: ExpertWeights, *, residual_TN: Tensor | None = None
) -> Tensor:
    """Compute `Backend.fused_experts`. Raises ValueError for quantised weights and for shapes that do not fit."""
    if not (isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)):
        raise ValueError("weights are quantised; allowed in batch-invariant kernels: dense ones")
    return fused_experts_with(LAUNCH, LAUNCH, x_TN, routing, weights, residual_TN)
