"""Compute linear layers with packed integer weights: unpack within the GEMM for few tokens, before it for many."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tok_kernels.launch_config import pdl_options
from tok_kernels.linear.quantized_weights import PackedWeight
from tok_kernels.linear.triton import check_linear, gated_linear, linear
from tok_kernels.linear.triton_config import (
    PackedDotLaunch,
    PackedStreamLaunch,
    packed_dot_launch,
    packed_stream_launch,
)
from tok_kernels.linear.triton_packed_dot import dequantize_kernel, packed_dot_kernel
from tok_kernels.linear.triton_packed_stream import packed_stream_kernel
from tok_kernels.norm_rope_kv.triton_norm import rms_norm

_DENSE_ROWS, _DENSE_BLOCK = 16, 256  # rows and columns that a program dequantises
_PAIR_BYTES = 4  # bytes of two 16-bit numbers, which the kernel of one token loads together
_STREAM_BITS = 4  # bits of the only weights that the kernel of one token takes
_MIN_CAPABILITY = (8, 0)
_MIN_GROUP = 32  # columns; a chunk of four words of 4 bits has 32


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
    """Return the layer's result by kernels that unpack the weight; None: it has to be dequantised."""
    if not unpacks(x_TK, weight, norm) or (gated and weight.shape[0] % 2):
        return None
    if len(x_TK) == 1 and weight.bits == _STREAM_BITS:
        return launch_packed_stream(
            packed_stream_launch(weight.columns), x_TK, weight, bias, norm, residual_TN, gated=gated
        )
    launch = packed_dot_launch(len(x_TK), weight)
    if launch is None:
        return None
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, weight.dtype)
    return launch_packed_dot(launch, x_TK, weight, bias, residual_TN, gated=gated)


def launch_packed_stream(
    launch: PackedStreamLaunch,
    x_TK: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """Launch the kernel of one token; the other arguments are those of `linear`, checked."""
    rows = len(weight.words)
    outputs = rows // 2 if gated else rows
    out_TN = residual_TN
    if out_TN is None:
        out_TN = torch.empty((1, outputs), dtype=weight.dtype, device=x_TK.device)
    x_K = x_TK[0] if x_TK.data_ptr() % _PAIR_BYTES == 0 and x_TK.stride(1) == 1 else x_TK[0].clone()
    pairs = x_K.view(torch.int32)
    gain, eps = (pairs, 0.0) if norm is None else (norm[0].contiguous().view(torch.int32), norm[1])
    packed_stream_kernel[(triton.cdiv(outputs, launch.rows),)](
        *(pairs, gain, eps, weight.words, weight.words.stride(0), weight.scale_GF),
        _or(weight.zero_GF, weight.scale_GF),
        _or(bias, weight.scale_GF).contiguous(),
        *(out_TN, outputs),
        K=weight.columns,
        GROUP=weight.group or weight.columns,
        ROWS=launch.rows,
        BLOCK=launch.block,
        HALF=x_TK.dtype == torch.float16,
        GATED=gated,
        ZEROS=weight.zero_GF is not None,
        NORM=norm is not None,
        BIAS=bias is not None,
        ADD=residual_TN is not None,
        ASM=x_TK.device.type != "cpu",
        num_warps=launch.warps,
        **pdl_options(x_TK.device),
    )
    return out_TN


def launch_packed_dot(
    launch: PackedDotLaunch,
    x_TK: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """Launch the kernel of several tokens; the other arguments are those of `linear`, checked."""
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    tokens, (rows, columns) = len(x_TK), weight.shape
    outputs = rows // 2 if gated else rows
    out_TN = residual_TN
    if out_TN is None:
        out_TN = torch.empty((tokens, outputs), dtype=weight.dtype, device=x_TK.device)
    tiles = triton.cdiv(rows, launch.lines), triton.cdiv(tokens, launch.tokens)
    sums = weight.scale_GF
    if launch.splits > 1:
        size = launch.splits * tiles[0] * tiles[1] * launch.lines * launch.tokens
        sums = torch.empty(size, dtype=torch.float32, device=x_TK.device)
    packed_dot_kernel[(tiles[0], launch.splits, tiles[1])](
        *(x_TK, x_TK.stride(0), tokens, weight.words, weight.words.stride(0), weight.scale_GF),
        *(_or(weight.zero_GF, weight.scale_GF), _or(bias, weight.scale_GF).contiguous()),
        *(out_TN, out_TN.stride(0), outputs, sums, weight.arrived, launch.splits),
        K=columns,
        GROUP=weight.group or columns,
        BITS=weight.bits,
        LINES=launch.lines,
        TOKENS=launch.tokens,
        BLOCK=launch.block,
        STAGES=launch.stages,
        SPLIT=launch.splits > 1,
        SCALED=launch.scaled,
        GATED=gated,
        ZEROS=weight.zero_GF is not None,
        BIAS=bias is not None,
        ADD=residual_TN is not None,
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
    for number, count in enumerate(weight.part_rows if weight.group_of_column is not None else (rows,)):
        dequantize_kernel[(triton.cdiv(count, _DENSE_ROWS), triton.cdiv(columns, _DENSE_BLOCK))](
            *(weight.words, weight.words.stride(0), weight.scale_GF, _or(weight.zero_GF, weight.scale_GF)),
            *(groups[number], out_FK, rows, first, first + count),
            K=columns,
            GROUP=weight.group or columns,
            BITS=weight.bits,
            LINES=_DENSE_ROWS,
            BLOCK=_DENSE_BLOCK,
            ZEROS=weight.zero_GF is not None,
            ORDERED=weight.group_of_column is not None,
            ASM=out_FK.device.type != "cpu",
            num_warps=4,
        )
        first += count
    return out_FK


def unpacks(x_TK: Tensor, weight: PackedWeight, norm: tuple[Tensor, float] | None = None) -> bool:
    """Return whether the kernels that unpack the weight take these operands."""
    short = {x_TK.dtype, weight.dtype, x_TK.dtype if norm is None else norm[0].dtype}
    capability = torch.cuda.get_device_capability(x_TK.device) if x_TK.device.type == "cuda" else _MIN_CAPABILITY
    return (
        x_TK.numel() > 0
        and weight.group_of_column is None
        and (weight.group is None or weight.group % _MIN_GROUP == 0)
        and short <= {torch.float16, torch.bfloat16}
        and weight.columns % 2 == 0
        and capability >= _MIN_CAPABILITY
    )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or if it is None a placeholder, which a kernel gets but does not read."""
    return other if tensor is None else tensor
