"""Compute root-mean-square norm in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) * weight` over the last axis, of `dtype` or x's own (Zhang & Sennrich 2019)."""
    x = x_TN.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight_N.float()).to(dtype or x_TN.dtype)
