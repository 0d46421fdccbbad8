"""Compute linear layers: a GEMV kernel for up to two tokens, the few-row GEMM for up to 64, and cuBLAS for more.

Both kernels are fused with bias, gated activation and residual addition, or with rotary embedding and KV cache write;
the GEMV kernel also with the norm.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from tok_kernels.batch import KVWrite
from tok_kernels.launch_config import pdl_options, supports_pdl
from tok_kernels.linear.quantized_weights import ScaledWeight
from tok_kernels.linear.reference import matmul
from tok_kernels.linear.triton_config import GemvLaunch, few_rows_launch, gemv_launch, use_few_row_gemm, use_gemv
from tok_kernels.linear.triton_few_rows import launch_few_rows
from tok_kernels.linear.triton_gemv import gemv_kernel
from tok_kernels.linear.triton_qkv import Rotation, can_fuse, make_rotation
from tok_kernels.norm_rope_kv.separate import write_qkv
from tok_kernels.norm_rope_kv.triton_activation import silu_and_mul
from tok_kernels.norm_rope_kv.triton_norm import rms_norm
from tok_kernels.norm_rope_kv.triton_rope import rope_and_write_kv


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Compute `Backend.linear`.

    Raises ValueError for shapes that do not fit, and for x of another dtype than W without a norm.
    """
    check_linear(x_TK, weight_NK.shape, bias_N, norm, weight_NK.dtype, residual_TN)
    outputs = weight_NK.shape[0]
    if _use_gemv(x_TK, weight_NK) and (residual_TN is None or residual_TN.stride(1) == 1):
        launch = gemv_launch(len(x_TK), outputs, x_TK.shape[1], gated=False)
        return launch_gemv(launch, x_TK, weight_NK, bias_N, norm, residual_TN, gated=False)
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, weight_NK.dtype)
    if _use_few_row_gemm(x_TK, weight_NK):
        few_rows = few_rows_launch(len(x_TK), outputs, x_TK.shape[1])
        return launch_few_rows(few_rows, x_TK, weight_NK, bias_N, residual_TN, gated=False)
    return matmul(x_TK, weight_NK, bias_N, residual_TN)


def gated_linear(
    x_TK: Tensor,
    gate_up_FK: Tensor,
    bias_F: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Compute `Backend.gated_linear`.

    Raises ValueError as `linear`, and for an odd number of rows.
    """
    check_linear(x_TK, gate_up_FK.shape, bias_F, norm, gate_up_FK.dtype)
    if gate_up_FK.shape[0] % 2:
        raise ValueError(f"gate_up has {gate_up_FK.shape[0]} rows; allowed: even numbers, gate and up in equal parts")
    if _use_gemv(x_TK, gate_up_FK):
        launch = gemv_launch(len(x_TK), gate_up_FK.shape[0] // 2, x_TK.shape[1], gated=True)
        return launch_gemv(launch, x_TK, gate_up_FK, bias_F, norm, None, gated=True)
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, gate_up_FK.dtype)
    if _use_few_row_gemm(x_TK, gate_up_FK):
        few_rows = few_rows_launch(len(x_TK), *gate_up_FK.shape)
        return launch_few_rows(few_rows, x_TK, gate_up_FK, bias_F, None, gated=True)
    return silu_and_mul(matmul(x_TK, gate_up_FK, bias_F, None))


def project_and_write_kv(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    write: KVWrite,
    *,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Compute `Backend.project_and_write_kv`; in one launch, after that of the norm, for few tokens.

    Raises ValueError as `linear`.
    """
    is_gemv = _use_gemv(x_TK, weight_NK)
    if not can_fuse(write) or not (is_gemv or _use_few_row_gemm(x_TK, weight_NK)):
        return write_qkv(rope_and_write_kv, linear(x_TK, weight_NK, bias_N, norm=norm), write)
    check_linear(x_TK, weight_NK.shape, bias_N, norm, weight_NK.dtype)
    (tokens, inputs), rows = x_TK.shape, len(weight_NK)
    rotation = make_rotation(write, rows, weight_NK.dtype)
    if is_gemv:
        launch = gemv_launch(tokens, rows, inputs, gated=False)
        launch = replace(launch, block_n=launch.block_n // 2)
        launch_gemv(launch, x_TK, weight_NK, bias_N, norm, None, gated=False, rotation=rotation)
    else:
        x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, weight_NK.dtype)
        few_rows = few_rows_launch(tokens, rows, inputs)
        launch_few_rows(few_rows, x_TK, weight_NK, bias_N, None, gated=False, rotation=rotation)
    return rotation.out.view(tokens, -1, write.cache.k.shape[3])


def launch_gemv(
    launch: GemvLaunch,
    x_TK: Tensor,
    weight: Tensor | ScaledWeight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
    rotation: Rotation | None = None,
) -> Tensor:
    """Launch the GEMV kernel; the arguments after `launch` are those of `linear`, already checked.

    The result has the dtype of the weight, or of x if the weight has 8 bits. A QKV projection has a `rotation`, and
    `block_n` then counts pairs.
    """
    if isinstance(weight, Tensor):
        values_NK, scale_NG, group, dtype = weight, weight, 0, weight.dtype
    else:
        values_NK, scale_NG, group, dtype = weight.values_NK, weight.scale_NG, weight.group or x_TK.shape[1], x_TK.dtype
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    tokens, inputs = x_TK.shape
    outputs = len(values_NK) // 2 if gated or rotation is not None else len(values_NK)
    out_TN = residual_TN if rotation is None else rotation.out
    if out_TN is None:
        out_TN = torch.empty((tokens, outputs), dtype=dtype, device=x_TK.device)
    norm_weight, eps = (x_TK, 0.0) if norm is None else (norm[0].contiguous(), norm[1])
    gemv_kernel[(triton.cdiv(outputs, launch.block_n),)](
        *(
            x_TK,
            x_TK.stride(0),
            norm_weight,
            eps,
            values_NK,
            scale_NG,
            values_NK if bias is None else bias.contiguous(),
        ),
        *(out_TN, out_TN.stride(0), outputs),
        *((None, x_TK, x_TK) if rotation is None else (rotation.arguments, rotation.position, rotation.cache_row)),
        TOKENS=tokens,
        K=inputs,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        VECTOR=launch.vector,
        GROUP_SIZE=group,
        GATED=gated,
        HALF=0 if rotation is None else rotation.half,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        ADD_RESIDUAL=residual_TN is not None,
        num_warps=launch.warps,
        **pdl_options(x_TK.device),
    )
    return out_TN


def _use_gemv(x_TK: Tensor, weight: Tensor) -> bool:
    return _have_16_bits(x_TK, weight) and use_gemv(*x_TK.shape)


def _use_few_row_gemm(x_TK: Tensor, weight: Tensor) -> bool:
    # The launches need the shared memory of Hopper GPUs; Triton's interpreter has no limit.
    fits_shared_memory = supports_pdl(x_TK.device) or x_TK.device.type == "cpu"
    return fits_shared_memory and _have_16_bits(x_TK, weight) and use_few_row_gemm(len(x_TK), *weight.shape)


def _have_16_bits(x_TK: Tensor, weight: Tensor) -> bool:
    """Return whether both operands have 16 bits and a layout that the kernels support."""
    return {x_TK.dtype, weight.dtype} <= {torch.float16, torch.bfloat16} and weight.is_contiguous()


def check_linear(
    x_TK: Tensor,
    shape: Sequence[int],
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    dtype: torch.dtype | None,
    residual_TN: Tensor | None = None,
) -> None:
    """Raise ValueError for operands of a linear layer whose shapes or dtypes do not fit.

    shape  shape of the weight
    dtype  required dtype of x without a norm; None: any
    """
    if x_TK.dim() != 2 or len(shape) != 2 or shape[1] != x_TK.shape[1]:
        raise ValueError(f"weight has shape {tuple(shape)}; allowed for x {tuple(x_TK.shape)}: (any, its last)")
    if bias is not None and bias.shape != (shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; allowed: {(shape[0],)}, weight's rows")
    if norm is not None and norm[0].shape != x_TK.shape[1:]:
        raise ValueError(f"norm has a weight of shape {tuple(norm[0].shape)}; allowed: {tuple(x_TK.shape[1:])}")
    if norm is None and dtype not in (None, x_TK.dtype):
        raise ValueError(f"x is {x_TK.dtype}; allowed without a norm: {dtype}, as the weight")
    if residual_TN is not None and residual_TN.shape != (len(x_TK), shape[0]):
        raise ValueError(f"residual has shape {tuple(residual_TN.shape)}; allowed: {(len(x_TK), shape[0])}")
