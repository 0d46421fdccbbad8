"""Compute linear layers with packed integer weights (W4A16, W8A16).

One token of 4-bit weights is computed by a GEMV kernel, up to 256 tokens by a GEMM kernel; both unpack weights in
registers. For more tokens, the weight is dequantised first.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tok_kernels.launch_config import pdl_options
from tok_kernels.linear.quantized_weights import PackedWeight
from tok_kernels.linear.triton import check_linear, gated_linear, linear
from tok_kernels.linear.triton_config import (
    PackedGemmLaunch,
    PackedGemvLaunch,
    packed_gemm_launch,
    packed_gemv_launch,
)
from tok_kernels.linear.triton_packed_gemm import dequantize_kernel, packed_gemm_kernel
from tok_kernels.linear.triton_packed_gemv import packed_gemv_kernel
from tok_kernels.norm_rope_kv.triton_norm import rms_norm

_DEQUANTIZE_BLOCK_N, _DEQUANTIZE_BLOCK_K = 16, 256  # rows and columns of a program
_PAIR_BYTES = 4  # bytes of two 16-bit values, which the GEMV kernel loads together
_GEMV_BITS = 4  # bits of a weight that the GEMV kernel supports
_MIN_CAPABILITY = (8, 0)
_MIN_GROUP = 32  # columns; four words of 4-bit values, which are unpacked together, have 32


def packed_linear(
    x_TK: Tensor,
    weight: PackedWeight,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Compute `Backend.packed_linear`. Raises ValueError as `linear`."""
    check_linear(x_TK, weight.shape, bias_N, norm, weight.dtype, residual_TN)
    if residual_TN is None or residual_TN.stride(1) == 1:
        out_TN = _unpacking_linear(x_TK, weight, bias_N, norm, residual_TN, gated=False)
        if out_TN is not None:
            return out_TN
    return linear(x_TK, dequantize(weight), bias_N, norm=norm, residual_TN=residual_TN)


def packed_gated_linear(
    x_TK: Tensor, gate_up: PackedWeight, bias_F: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """Compute `Backend.packed_gated_linear`. Raises ValueError as `gated_linear`."""
    check_linear(x_TK, gate_up.shape, bias_F, norm, gate_up.dtype)
    out_TN = _unpacking_linear(x_TK, gate_up, bias_F, norm, None, gated=True)
    return gated_linear(x_TK, dequantize(gate_up), bias_F, norm=norm) if out_TN is None else out_TN


def _unpacking_linear(
    x_TK: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
) -> Tensor | None:
    """Compute the layer by a kernel that unpacks the weight; None: no such kernel supports it, or cuBLAS is faster."""
    if not unpacks(x_TK, weight, norm) or (gated and weight.shape[0] % 2):
        return None
    if len(x_TK) == 1 and weight.bits == _GEMV_BITS:
        return launch_packed_gemv(
            packed_gemv_launch(weight.columns), x_TK, weight, bias, norm, residual_TN, gated=gated
        )
    launch = packed_gemm_launch(len(x_TK), weight)
    if launch is None:
        return None
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, weight.dtype)
    return launch_packed_gemm(launch, x_TK, weight, bias, residual_TN, gated=gated)


def launch_packed_gemv(
    launch: PackedGemvLaunch,
    x_TK: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """Launch the GEMV kernel; the arguments after `launch` are those of `linear`, already checked."""
    rows = len(weight.words)
    outputs = rows // 2 if gated else rows
    out_TN = residual_TN
    if out_TN is None:
        out_TN = torch.empty((1, outputs), dtype=weight.dtype, device=x_TK.device)
    x_K = x_TK[0] if x_TK.data_ptr() % _PAIR_BYTES == 0 and x_TK.stride(1) == 1 else x_TK[0].clone()
    pairs = x_K.view(torch.int32)
    norm_pairs, eps = (pairs, 0.0) if norm is None else (norm[0].contiguous().view(torch.int32), norm[1])
    packed_gemv_kernel[(triton.cdiv(outputs, launch.block_n),)](
        *(pairs, norm_pairs, eps, weight.words, weight.words.stride(0), weight.scale_GF),
        _or_placeholder(weight.zero_GF, weight.scale_GF),
        _or_placeholder(bias, weight.scale_GF).contiguous(),
        *(out_TN, outputs),
        K=weight.columns,
        GROUP_SIZE=weight.group or weight.columns,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        FP16=x_TK.dtype == torch.float16,
        GATED=gated,
        HAS_ZEROS=weight.zero_GF is not None,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        ADD_RESIDUAL=residual_TN is not None,
        ASM=x_TK.device.type != "cpu",
        num_warps=launch.warps,
        **pdl_options(x_TK.device),
    )
    return out_TN


def launch_packed_gemm(
    launch: PackedGemmLaunch,
    x_TK: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """Launch the GEMM kernel; the arguments after `launch` are those of `linear`, already checked."""
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    tokens, (rows, columns) = len(x_TK), weight.shape
    outputs = rows // 2 if gated else rows
    out_TN = residual_TN
    if out_TN is None:
        out_TN = torch.empty((tokens, outputs), dtype=weight.dtype, device=x_TK.device)
    tiles = triton.cdiv(rows, launch.block_n), triton.cdiv(tokens, launch.block_m)
    partial = weight.scale_GF
    if launch.splits > 1:
        size = launch.splits * tiles[0] * tiles[1] * launch.block_n * launch.block_m
        partial = torch.empty(size, dtype=torch.float32, device=x_TK.device)
    packed_gemm_kernel[(tiles[0], launch.splits, tiles[1])](
        *(x_TK, x_TK.stride(0), tokens, weight.words, weight.words.stride(0), weight.scale_GF),
        *(_or_placeholder(weight.zero_GF, weight.scale_GF), _or_placeholder(bias, weight.scale_GF).contiguous()),
        *(out_TN, out_TN.stride(0), outputs, partial, weight.split_k_counters, launch.splits),
        K=columns,
        GROUP_SIZE=weight.group or columns,
        BITS=weight.bits,
        BLOCK_N=launch.block_n,
        BLOCK_M=launch.block_m,
        BLOCK_K=launch.block_k,
        NUM_STAGES=launch.stages,
        SPLIT=launch.splits > 1,
        GATED=gated,
        HAS_ZEROS=weight.zero_GF is not None,
        HAS_BIAS=bias is not None,
        ADD_RESIDUAL=residual_TN is not None,
        ASM=x_TK.device.type != "cpu",
        num_warps=launch.warps,
        **pdl_options(x_TK.device),
    )
    return out_TN


def dequantize(weight: PackedWeight) -> Tensor:
    """Compute `Backend.dequantize`."""
    rows, columns = weight.shape
    out_FK = torch.empty((rows, columns), dtype=weight.dtype, device=weight.words.device)
    groups = weight.words if weight.group_of_column is None else weight.group_of_column
    first = 0
    for i, count in enumerate(weight.part_rows if weight.group_of_column is not None else (rows,)):
        dequantize_kernel[(triton.cdiv(count, _DEQUANTIZE_BLOCK_N), triton.cdiv(columns, _DEQUANTIZE_BLOCK_K))](
            *(weight.words, weight.words.stride(0), weight.scale_GF, _or_placeholder(weight.zero_GF, weight.scale_GF)),
            *(groups[i], out_FK, rows, first, first + count),
            K=columns,
            GROUP_SIZE=weight.group or columns,
            BITS=weight.bits,
            BLOCK_N=_DEQUANTIZE_BLOCK_N,
            BLOCK_K=_DEQUANTIZE_BLOCK_K,
            HAS_ZEROS=weight.zero_GF is not None,
            GROUP_INDEX=weight.group_of_column is not None,
            ASM=out_FK.device.type != "cpu",
            num_warps=4,
        )
        first += count
    return out_FK


def unpacks(x_TK: Tensor, weight: PackedWeight, norm: tuple[Tensor, float] | None = None) -> bool:
    """Return whether the kernels that unpack the weight support these operands."""
    dtypes = {x_TK.dtype, weight.dtype, x_TK.dtype if norm is None else norm[0].dtype}
    capability = torch.cuda.get_device_capability(x_TK.device) if x_TK.device.type == "cuda" else _MIN_CAPABILITY
    return (
        x_TK.numel() > 0
        and weight.group_of_column is None
        and (weight.group is None or weight.group % _MIN_GROUP == 0)
        and dtypes <= {torch.float16, torch.bfloat16}
        and weight.columns % 2 == 0
        and capability >= _MIN_CAPABILITY
    )


def _or_placeholder(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Return the tensor, or if it is None the placeholder, which the kernel receives but does not read."""
    return placeholder if tensor is None else tensor
