"""Compute linear layers on a GPU so that a row's bits do not depend on the other rows, nor on their number.

Every kernel adds a row's products in one chain along the inputs: tensor cores add 16 products at a time to a float32
sum. cuBLASLt's kernels do so on Hopper unless they split the inputs among thread blocks, which `forbid_split_k`
excludes. Without these, cuBLASLt is slow for few rows, which a kernel of this module computes instead.

The product is rounded to the weight's dtype before bias, gate and residual follow, whichever kernel computes them.
cuBLASLt's own additions round otherwise for some numbers of rows.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options
from tok_kernels.linear.triton import check_linear
from tok_kernels.linear.triton_config import FewRowsLaunch, chain_launch, chains
from tok_kernels.norm_rope_kv.triton_activation import silu_and_mul
from tok_kernels.norm_rope_kv.triton_norm import rms_norm

_TILE_ROWS = 16  # rows of x of a program


def forbid_split_k() -> None:
    """Make torch's GEMMs of 16-bit numbers run in cuBLASLt, without kernels that split the inputs, in this process."""
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
    if chains(len(x_TK), *weight_NK.shape):
        return _few_rows(x_TK, weight_NK, bias_N, residual_TN, gated=False)
    out_TN = functional.linear(x_TK, weight_NK)
    if bias_N is not None:
        out_TN += bias_N
    return out_TN if residual_TN is None else residual_TN.add_(out_TN)


def gated_linear(
    x_TK: Tensor, gate_up_FK: Tensor, bias_F: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """Compute `Backend.gated_linear`. Raises ValueError as `linear`, and for an odd number of rows."""
    if gate_up_FK.shape[0] % 2 or not chains(len(x_TK), *gate_up_FK.shape):
        return silu_and_mul(linear(x_TK, gate_up_FK, bias_F, norm=norm))
    check_linear(x_TK, gate_up_FK.shape, bias_F, norm, gate_up_FK.dtype)
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, gate_up_FK.dtype)
    return _few_rows(x_TK, gate_up_FK, bias_F, None, gated=True)


def _few_rows(
    x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None, residual_TN: Tensor | None, *, gated: bool
) -> Tensor:
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    tokens, inputs = x_TK.shape
    outputs = len(weight_NK) // 2 if gated else len(weight_NK)
    out_TN = residual_TN
    if out_TN is None:
        out_TN = torch.empty((tokens, outputs), dtype=weight_NK.dtype, device=x_TK.device)
    launch: FewRowsLaunch = chain_launch(outputs, inputs, gated=gated)
    _few_rows_kernel[(triton.cdiv(outputs, launch.rows), triton.cdiv(tokens, _TILE_ROWS))](
        *(x_TK, x_TK.stride(0), weight_NK.contiguous(), weight_NK if bias is None else bias.contiguous()),
        *(out_TN, *out_TN.stride(), tokens, outputs, inputs),
        T=_TILE_ROWS,
        ROWS=launch.rows,
        BLOCK=launch.block,
        STAGES=launch.stages,
        EVEN=inputs % launch.block == 0,
        GATED=gated,
        BIAS=bias is not None,
        ADD=residual_TN is not None,
        num_warps=launch.warps,
        **pdl_options(x_TK.device),
    )
    return out_TN


@triton.jit
def _columns(ptrs: tl.tensor, block: tl.tensor, K: tl.tensor, BLOCK: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """Return BLOCK columns of rows of the weight; zeros past the end."""
    if EVEN:
        return tl.load(ptrs + block * BLOCK, eviction_policy="evict_first")
    inside = tl.arange(0, BLOCK) < K - block * BLOCK
    return tl.load(ptrs + block * BLOCK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _finished(sums: tl.tensor, bias_ptr: tl.tensor, row: tl.tensor, to: tl.dtype, BIAS: tl.constexpr) -> tl.tensor:
    """Return the products rounded to `to`, with the bias, float32."""
    y = sums.to(to).to(tl.float32)
    if BIAS:
        y = (y + tl.load(bias_ptr + row).to(tl.float32)[:, None]).to(to).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["tokens"])
def _few_rows_kernel(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_row: tl.tensor,
    out_column: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    K: tl.tensor,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute ROWS outputs of T tokens, with the arguments of `tok_kernels.linear.triton_few_rows`."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the last one read that row again, so that no load needs a mask.
    row = tl.minimum(n, outputs - 1).to(tl.int64)
    t = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight_ptrs = weight_ptr + row[:, None] * K + column[None, :]
    up_ptrs = weight_ptr + (row + outputs)[:, None] * K + column[None, :]
    x_ptrs = x_ptr + t[:, None] * x_row + column[None, :]
    sums = tl.zeros((ROWS, T), tl.float32)
    up_sums = tl.zeros((ROWS, T), tl.float32)
    if PDL:
        gdc_wait()
    for block in tl.range(0, tl.cdiv(K, BLOCK), num_stages=STAGES):
        inside = (t < tokens)[:, None]
        if not EVEN:
            inside &= (column < K - block * BLOCK)[None, :]
        x = tl.trans(tl.load(x_ptrs + block * BLOCK, mask=inside, other=0.0))
        sums = tl.dot(_columns(weight_ptrs, block, K, BLOCK, EVEN), x, sums)
        if GATED:
            up_sums = tl.dot(_columns(up_ptrs, block, K, BLOCK, EVEN), x, up_sums)
    to = weight_ptr.dtype.element_ty
    y = _finished(sums, bias_ptr, row, to, BIAS)
    if GATED:
        # As `silu_and_mul` of 16-bit numbers.
        y = y / (1.0 + tl.exp(-y)) * _finished(up_sums, bias_ptr, row + outputs, to, BIAS)
    out = out_ptr + t[:, None] * out_row + n[None, :] * out_column
    stored = (t < tokens)[:, None] & (n < outputs)[None, :]
    y = tl.trans(y)
    if ADD:
        y += tl.load(out, mask=stored, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=stored)
