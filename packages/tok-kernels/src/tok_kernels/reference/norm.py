"""Root-mean-square norm, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis, of x's dtype (Zhang & Sennrich 2019)."""
    x = x_TN.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight_N.float()).to(x_TN.dtype)


def add_rms_norm(x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns `(rms_norm(residual'), residual')` with `residual' = residual + x`, both of x's dtype."""
    residual = (x_TN.float() + residual_TN.float()).to(x_TN.dtype)
    return rms_norm(residual, weight_N, eps), residual
