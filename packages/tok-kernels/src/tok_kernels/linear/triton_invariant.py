"""Compute batch-invariant linear layers on a GPU: a row's bits do not depend on other rows, nor on their number.

Every kernel accumulates along the inputs in the same order: tensor cores add 16 products at a time to a float32 sum.
cuBLASLt's kernels do so on Hopper unless they use split-K, which `forbid_split_k` excludes. Without split-K, cuBLASLt
is slow for few rows, so the few-row GEMM (`triton_few_rows`) computes them.

Every kernel rounds the GEMM's result to the weight's dtype before bias, activation and residual. The epilogues of
cuBLASLt round differently for some numbers of rows, so they are not used.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tok_kernels.linear.triton import check_linear
from tok_kernels.linear.triton_config import invariant_few_row_launch, use_invariant_few_row_gemm
from tok_kernels.linear.triton_few_rows import launch_few_rows
from tok_kernels.norm_rope_kv.triton_activation import silu_and_mul
from tok_kernels.norm_rope_kv.triton_norm import rms_norm


def forbid_split_k() -> None:
    """Make torch's 16-bit GEMMs in this process use cuBLASLt without split-K."""
    settings = torch.backends.cuda.matmul
    torch.backends.cuda.preferred_blas_library("cublaslt")
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    settings.allow_fp16_reduced_precision_reduction = (False, False)


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Compute `Backend.linear`. Raises ValueError as `tok_kernels.linear.triton.linear`."""
    check_linear(x_TK, weight_NK.shape, bias_N, norm, weight_NK.dtype, residual_TN)
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, weight_NK.dtype)
    if use_invariant_few_row_gemm(len(x_TK), *weight_NK.shape):
        launch = invariant_few_row_launch(*weight_NK.shape, gated=False)
        weight_NK = weight_NK.contiguous()
        return launch_few_rows(launch, x_TK, weight_NK, bias_N, residual_TN, gated=False, rounded=True)
    out_TN = functional.linear(x_TK, weight_NK)
    if bias_N is not None:
        out_TN += bias_N
    return out_TN if residual_TN is None else residual_TN.add_(out_TN)


def gated_linear(
    x_TK: Tensor, gate_up_FK: Tensor, bias_F: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """Compute `Backend.gated_linear`. Raises ValueError as `linear`, and for an odd number of rows."""
    if gate_up_FK.shape[0] % 2 or not use_invariant_few_row_gemm(len(x_TK), *gate_up_FK.shape):
        return silu_and_mul(linear(x_TK, gate_up_FK, bias_F, norm=norm))
    check_linear(x_TK, gate_up_FK.shape, bias_F, norm, gate_up_FK.dtype)
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, gate_up_FK.dtype)
    launch = invariant_few_row_launch(*gate_up_FK.shape, gated=True)
    return launch_few_rows(launch, x_TK, gate_up_FK.contiguous(), bias_F, None, gated=True, rounded=True)
