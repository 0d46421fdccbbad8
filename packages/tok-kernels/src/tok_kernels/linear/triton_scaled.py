"""Compute linear layers with 8-bit weights: W8A16 for one token, and W8A8 for more.

The GEMV kernel computes one token, the few-row GEMM up to 64 tokens, and cuBLAS more. The first two also rotate queries
and keys, and write the KV cache. If a Triton kernel adds the residual or applies the gated activation after cuBLAS,
this kernel also applies the scales, since cuBLAS is faster without them. cuBLAS multiplies weights with block-wise
scales from two tokens on.

Tensor cores accumulate float8 products with 14 bits (`use_fast_accum`). With accumulation in float32, cuBLAS takes 6 to
10 % longer, and the few-row GEMM 18 to 40 %.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from tok_kernels.batch import KVWrite
from tok_kernels.launch_config import max_shared_bytes
from tok_kernels.linear.quantized_weights import QuantizedRows, ScaledWeight
from tok_kernels.linear.triton import check_linear, gated_linear, launch_gemv, linear
from tok_kernels.linear.triton_config import (
    MAX_FEW_ROWS,
    FewRowsLaunch,
    scaled_few_rows_launch,
    scaled_gemv_launch,
    use_gemv,
)
from tok_kernels.linear.triton_few_rows import launch_few_rows
from tok_kernels.linear.triton_qkv import can_fuse, make_rotation
from tok_kernels.linear.triton_quantize import apply_scales, gate_and_quantize, quantize_rows
from tok_kernels.norm_rope_kv.separate import write_qkv
from tok_kernels.norm_rope_kv.triton_activation import silu_and_mul
from tok_kernels.norm_rope_kv.triton_rope import rope_and_write_kv

MIN_CAPABILITY = {torch.float8_e4m3fn: (8, 9), torch.int8: (8, 0)}
"""Minimum compute capability of GPUs whose tensor cores multiply a dtype."""

_SCALE_BLOCK = 128  # rows and columns that share a block-wise scale in cuBLAS
_SIZE_MULTIPLE = 16  # rows and columns of 8-bit matrices must be multiples of it in cuBLAS


def scaled_linear(
    x_TK: Tensor | QuantizedRows,
    weight: ScaledWeight,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Compute `Backend.scaled_linear`. Raises ValueError as `linear`."""
    if isinstance(x_TK, QuantizedRows):
        return _cublas(x_TK, weight, bias_N, residual_TN)
    check_linear(x_TK, weight.values_NK.shape, bias_N, norm, dtype=None)
    if not _is_supported(x_TK, weight):
        bias_N = None if bias_N is None else bias_N.to(x_TK.dtype)
        return linear(x_TK, weight.dense(x_TK.dtype), bias_N, norm=norm, residual_TN=residual_TN)
    if use_gemv(*x_TK.shape, bits=8):
        launch = scaled_gemv_launch(x_TK.shape[1], gated=False)
        return launch_gemv(launch, x_TK, weight, bias_N, norm, residual_TN, gated=False)
    rows = quantize_rows(x_TK, weight, norm)
    if len(x_TK) <= MAX_FEW_ROWS and weight.group is None:
        few_rows = _few_rows_launch(x_TK, weight)
        return launch_few_rows(few_rows, rows, weight, bias_N, residual_TN, gated=False)
    return _cublas(rows, weight, bias_N, residual_TN)


def scaled_gated_linear(
    x_TK: Tensor,
    gate_up: ScaledWeight,
    bias_F: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    down: ScaledWeight | None = None,
) -> Tensor | QuantizedRows:
    """Compute `Backend.scaled_gated_linear`. Raises ValueError as `gated_linear`."""
    check_linear(x_TK, gate_up.values_NK.shape, bias_F, norm, dtype=None)
    if not _is_supported(x_TK, gate_up):
        return gated_linear(x_TK, gate_up.dense(x_TK.dtype), bias_F, norm=norm)
    if use_gemv(*x_TK.shape, bits=8):
        launch = scaled_gemv_launch(x_TK.shape[1], gated=True)
        return launch_gemv(launch, x_TK, gate_up, bias_F, norm, None, gated=True)
    rows = quantize_rows(x_TK, gate_up, norm)
    if len(x_TK) <= MAX_FEW_ROWS and gate_up.group is None:
        few_rows = _few_rows_launch(x_TK, gate_up)
        return launch_few_rows(few_rows, rows, gate_up, bias_F, None, gated=True)
    if down is None or not _is_supported(x_TK, down):
        return silu_and_mul(_cublas(rows, gate_up, bias_F, None))
    if gate_up.group is not None:
        return gate_and_quantize(_cublas_blockwise(rows, gate_up), None, gate_up, bias_F, down)
    return gate_and_quantize(_cublas_unscaled(rows, gate_up), rows.scale_TG, gate_up, bias_F, down)


def scaled_project_and_write_kv(
    x_TK: Tensor,
    weight: ScaledWeight,
    bias_N: Tensor | None,
    write: KVWrite,
    *,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Compute `Backend.scaled_project_and_write_kv`; in one launch, after that of `quantize_rows`, for few tokens.

    Raises ValueError as `linear`.
    """
    (tokens, inputs), rows = x_TK.shape, len(weight.values_NK)
    is_gemv = use_gemv(tokens, inputs, bits=8)
    fits = is_gemv or (tokens <= MAX_FEW_ROWS and weight.group is None)
    if not fits or not can_fuse(write) or not _is_supported(x_TK, weight):
        return write_qkv(rope_and_write_kv, scaled_linear(x_TK, weight, bias_N, norm=norm), write)
    check_linear(x_TK, weight.values_NK.shape, bias_N, norm, dtype=None)
    rotation = make_rotation(write, rows, x_TK.dtype)
    if is_gemv:
        launch = scaled_gemv_launch(inputs, gated=False)
        launch = replace(launch, block_n=launch.block_n // 2)
        launch_gemv(launch, x_TK, weight, bias_N, norm, None, gated=False, rotation=rotation)
    else:
        few_rows = _few_rows_launch(x_TK, weight)
        quantized = quantize_rows(x_TK, weight, norm)
        launch_few_rows(few_rows, quantized, weight, bias_N, None, gated=False, rotation=rotation)
    return rotation.out.view(tokens, -1, write.cache.k.shape[3])


def _few_rows_launch(x_TK: Tensor, weight: ScaledWeight) -> FewRowsLaunch:
    rows, inputs = weight.values_NK.shape
    return scaled_few_rows_launch(len(x_TK), rows, inputs, max_shared_bytes(x_TK.device))


def _cublas(rows: QuantizedRows, weight: ScaledWeight, bias_N: Tensor | None, residual_TN: Tensor | None) -> Tensor:
    """Return `x Wᵀ + bias` by cuBLAS, or add it to the residual in place."""
    if weight.group is not None:
        y_TN = _cublas_blockwise(rows, weight)
        y_TN = y_TN if bias_N is None else y_TN.add_(bias_N)
        return y_TN if residual_TN is None else residual_TN.add_(y_TN)
    if residual_TN is None and weight.values_NK.dtype != torch.int8:
        y_TN = torch._scaled_mm(
            *(rows.values_TK, weight.values_NK.t(), rows.scale_TG, weight.scale_NG.t()),
            bias=None if bias_N is None else bias_N.bfloat16(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y_TN.to(rows.dtype)
    sums_TN = _cublas_unscaled(rows, weight)
    out_TN = residual_TN
    if out_TN is None:
        out_TN = torch.empty(sums_TN.shape, dtype=rows.dtype, device=sums_TN.device)
    return apply_scales(sums_TN, rows.scale_TG, weight, bias_N, out_TN, add=residual_TN is not None)


def _cublas_unscaled(rows: QuantizedRows, weight: ScaledWeight) -> Tensor:
    """Return the product of the values without their scales: bfloat16 for float8, int32 for int8."""
    if weight.values_NK.dtype == torch.int8:
        return torch._int_mm(rows.values_TK, weight.values_NK.t())
    one = _one(rows.values_TK.device)
    return torch._scaled_mm(
        *(rows.values_TK, weight.values_NK.t(), one, one), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _cublas_blockwise(rows: QuantizedRows, weight: ScaledWeight) -> Tensor:
    """Return the GEMM with scales of 128 columns (activations) and of 128 × 128 blocks (weight)."""
    scale_BG = weight.scale_NG[::_SCALE_BLOCK]
    # cuBLAS requires that the scales of each block of rows begin at a multiple of 16 bytes.
    scale_BG = functional.pad(scale_BG, (0, -scale_BG.shape[1] % 4)).contiguous()
    y_PN: Tensor = functional.scaled_mm(
        *(rows.values_TK, weight.values_NK.t(), rows.scale_TG, ScalingType.BlockWise1x128),
        *(scale_BG.t(), ScalingType.BlockWise128x128),
        output_dtype=torch.bfloat16,
    )
    return y_PN[: rows.tokens].to(rows.dtype)


@lru_cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def _is_supported(x_TK: Tensor, weight: ScaledWeight) -> bool:
    """Return whether the 8-bit kernels support these operands; otherwise the weight is dequantised."""
    values = weight.values_NK
    capability = torch.cuda.get_device_capability(x_TK.device) if x_TK.device.type == "cuda" else (9, 0)
    if not len(x_TK) or x_TK.dtype not in (torch.bfloat16, torch.float16) or capability < MIN_CAPABILITY[values.dtype]:
        return False
    if weight.group is None:
        return not any(size % _SIZE_MULTIPLE for size in values.shape)
    fits = not any(size % _SCALE_BLOCK for size in (*values.shape, weight.block_rows)) and weight.group == _SCALE_BLOCK
    return fits and capability == (9, 0) and values.dtype == torch.float8_e4m3fn
