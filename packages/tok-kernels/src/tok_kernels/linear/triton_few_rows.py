"""Multiply few rows of activations by a weight, both of 8 bits: the weight is read once, at the memory's bandwidth.

The weight is the first operand of the tensor cores' products, whose tiles have at least 64 rows; the few rows of
activations are the second one.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _block(ptrs: tl.tensor, block: tl.tensor, K: tl.tensor, BLOCK: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """Return BLOCK columns of each row of a weight, which is read once; zeros past the end."""
    if EVEN:
        return tl.load(ptrs + block * BLOCK, eviction_policy="evict_first")
    inside = tl.arange(0, BLOCK) < K - block * BLOCK
    return tl.load(ptrs + block * BLOCK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["tokens"])
def few_rows_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_row: tl.tensor,
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
    """Compute ROWS outputs of all tokens, at most T.

    EVEN      K is a multiple of BLOCK
    GATED     row `n` of the weight is a gate, and row `n + outputs` its up projection; the result is silu(gate) * up
    BIAS      the bias is added to the result
    ADD       the values at `out` are added to the result
    PDL       this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the last one read that row again, so that no load needs a mask.
    row = tl.minimum(n, outputs - 1).to(tl.int64)
    t = tl.arange(0, T)
    column = tl.arange(0, BLOCK)
    up_row = row + outputs
    weight_ptrs = weight_ptr + row[:, None] * K + column[None, :]
    up_ptrs = weight_ptr + up_row[:, None] * K + column[None, :]
    x_ptrs = x_ptr + t[:, None] * K + column[None, :]
    whole: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    sums = tl.zeros((ROWS, T), tl.int32 if whole else tl.float32)
    up_sums = tl.zeros((ROWS, T), tl.int32 if whole else tl.float32)
    if PDL:
        gdc_wait()
    for block in tl.range(0, tl.cdiv(K, BLOCK), num_stages=STAGES):
        inside = (t < tokens)[:, None]
        if not EVEN:
            inside &= (column < K - block * BLOCK)[None, :]
        x = tl.load(x_ptrs + block * BLOCK, mask=inside, other=0.0)
        weight = _block(weight_ptrs, block, K, BLOCK, EVEN)
        if GATED:
            up = _block(up_ptrs, block, K, BLOCK, EVEN)
        sums = tl.dot(weight, tl.trans(x), sums, out_dtype=sums.dtype)
        if GATED:
            up_sums = tl.dot(up, tl.trans(x), up_sums, out_dtype=sums.dtype)
    x_scale = tl.load(x_scale_ptr + t, mask=t < tokens, other=0.0)[None, :]
    y = sums.to(tl.float32) * tl.load(scale_ptr + row)[:, None] * x_scale
    if BIAS:
        y += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    if GATED:
        more = up_sums.to(tl.float32) * tl.load(scale_ptr + up_row)[:, None] * x_scale
        if BIAS:
            more += tl.load(bias_ptr + up_row).to(tl.float32)[:, None]
        y = y / (1.0 + tl.exp(-y)) * more
    out = out_ptr + t.to(tl.int64)[:, None] * out_row + n[None, :]
    stored = (t < tokens)[:, None] & (n < outputs)[None, :]
    y = tl.trans(y)
    if ADD:
        y += tl.load(out, mask=stored, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=stored)
