"""Linear layers: one kernel with norm, activation and residual addition inside for few tokens, torch's for many."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from tok_kernels.triton.activation import silu_and_mul
from tok_kernels.triton.linear_config import Launch, linear_launch, streams
from tok_kernels.triton.linear_stream import stream
from tok_kernels.triton.norm import rms_norm


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual_TN: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """`x Wᵀ + bias`, of x's dtype; with `norm`, a weight `[K]` and eps, of `rms_norm(x)`. A `residual`, of x's dtype
    too, gains it in place and is returned. `wide`, without a residual: float32, the sums not rounded; the weight may
    then have another 16-bit dtype than x, in which the norm's result is multiplied.

    Raises ValueError for shapes that do not fit, and for a residual of a wide product.
    """
    _check(x_TK, weight_NK, bias_N, norm)
    outputs = weight_NK.shape[0]
    if wide and residual_TN is not None:
        raise ValueError("a residual is given; allowed: none where wide")
    if residual_TN is not None and residual_TN.shape != (len(x_TK), outputs):
        raise ValueError(f"residual has shape {tuple(residual_TN.shape)}; allowed: {(len(x_TK), outputs)}")
    if _streams(x_TK, weight_NK, mixed=wide) and (residual_TN is None or residual_TN.stride(1) == 1):
        launch = linear_launch(outputs, x_TK.shape[1], gated=False)
        return launch_stream(launch, x_TK, weight_NK, bias_N, norm, residual_TN, gated=False, wide=wide)
    if wide:
        x_TK = x_TK.to(weight_NK.dtype) if norm is None else rms_norm(x_TK, *norm, weight_NK.dtype)
        return _wide(x_TK, weight_NK, bias_N)
    if residual_TN is None:
        return functional.linear(_normed(x_TK, norm), weight_NK, bias_N)
    if bias_N is not None:
        residual_TN += bias_N
    return residual_TN.addmm_(_normed(x_TK, norm), weight_NK.t())


def gated_linear(
    x_TK: Tensor,
    gate_up_FK: Tensor,
    bias_F: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """`silu_and_mul(linear(x, gate_up, bias, norm=norm))`: `[T, K] -> [T, F / 2]` (Shazeer 2020).

    Raises ValueError for shapes that do not fit.
    """
    _check(x_TK, gate_up_FK, bias_F, norm)
    if gate_up_FK.shape[0] % 2:
        raise ValueError(f"gate_up has {gate_up_FK.shape[0]} rows; allowed: even numbers, gate and up in equal parts")
    if _streams(x_TK, gate_up_FK):
        launch = linear_launch(gate_up_FK.shape[0] // 2, x_TK.shape[1], gated=True)
        return launch_stream(launch, x_TK, gate_up_FK, bias_F, norm, None, gated=True)
    return silu_and_mul(functional.linear(_normed(x_TK, norm), gate_up_FK, bias_F))


def launch_stream(
    launch: Launch,
    x_TK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
    wide: bool = False,
) -> Tensor:
    """The kernel for few tokens, launched as told; arguments as of `linear` and `gated_linear`, and checked."""
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    tokens, inputs = x_TK.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out_TN = residual_TN
    if out_TN is None:
        out_TN = torch.empty((tokens, outputs), dtype=torch.float32 if wide else x_TK.dtype, device=x_TK.device)
    gain, eps = (x_TK, 0.0) if norm is None else (norm[0].contiguous(), norm[1])
    stream[(triton.cdiv(outputs, launch.rows),)](
        *(x_TK, x_TK.stride(0), gain, eps, weight, weight if bias is None else bias.contiguous()),
        *(out_TN, out_TN.stride(0), outputs),
        T=tokens,
        K=inputs,
        ROWS=launch.rows,
        BLOCK=launch.block,
        STAGES=launch.stages,
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias is not None,
        ADD=residual_TN is not None,
        num_warps=launch.warps,
    )
    return out_TN


def _wide(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The product in float32 of operands that are read as they are."""
    if x_TK.dtype == torch.float32:
        return functional.linear(x_TK, weight_NK, bias_N)
    if x_TK.device.type != "cuda":  # where kernels are interpreted: only CUDA's products have a dtype of their own
        out_TN = functional.linear(x_TK.float(), weight_NK.float())
    else:
        out_TN = torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32)
    return out_TN if bias_N is None else out_TN.add_(bias_N)


def _streams(x_TK: Tensor, weight: Tensor, *, mixed: bool = False) -> bool:
    short = {x_TK.dtype, weight.dtype} <= {torch.float16, torch.bfloat16} and (mixed or x_TK.dtype == weight.dtype)
    return short and weight.is_contiguous() and streams(*x_TK.shape)


def _normed(x_TK: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    return x_TK if norm is None else rms_norm(x_TK, *norm)


def _check(x_TK: Tensor, weight: Tensor, bias: Tensor | None, norm: tuple[Tensor, float] | None) -> None:
    if x_TK.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x_TK.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; allowed for x {tuple(x_TK.shape)}: (any, its last)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; allowed: {tuple(weight.shape[:1])}, weight's rows")
    if norm is not None and norm[0].shape != x_TK.shape[1:]:
        raise ValueError(f"norm has a weight of shape {tuple(norm[0].shape)}; allowed: {tuple(x_TK.shape[1:])}")
