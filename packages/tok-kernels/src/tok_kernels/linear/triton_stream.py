"""Compute linear layers for one token or two (GEMV): each program reads its rows of the weights once, block by block.

A program sums `ROWS` outputs of all tokens without tensor cores, since the time is that of reading the weights. The
partial sums of the threads are added once, at the end, in a fixed order.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _columns(ptr: tl.tensor, start: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return BLOCK entries of a vector from column `start` on, float32; 0 past the end."""
    column = start + tl.arange(0, BLOCK)
    if K % BLOCK == 0:
        return tl.load(ptr + column).to(tl.float32)
    return tl.load(ptr + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def _rows_columns(lines_ptr: tl.tensor, start: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return BLOCK columns of weight rows from column `start` on, float32 `[LINES, BLOCK]`; 0 past the end."""
    if K % BLOCK == 0:
        return tl.load(lines_ptr + start, eviction_policy="evict_first").to(tl.float32)
    inside = (start + tl.arange(0, BLOCK) < K)[None, :]
    return tl.load(lines_ptr + start, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _gather(
    sums: tl.tensor,
    squares: tl.tensor,
    weights: tl.tensor,
    row_scale_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    norm_ptr: tl.tensor,
    start: tl.tensor,
    T: tl.constexpr,
    K: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Add a block of columns to each token's sums `[LINES, BLOCK // VECTOR]` and, with NORM, to its sum of squares.

    A thread first adds up the VECTOR elements that it loads at once, so that it holds fewer sums. It multiplies these
    by the scale of their group of columns, if each row has several.
    """
    if GROUP > 0 and GROUP < K:
        column = start + tl.arange(0, BLOCK // VECTOR) * VECTOR
        scale = tl.load(row_scale_ptr + column // GROUP, mask=(column < K)[None, :], other=0.0)
    if NORM:
        gain = _columns(norm_ptr, start, K, BLOCK)
    new_sums = ()
    new_squares = ()
    for t in tl.static_range(T):
        x = _columns(x_ptr + t * x_row, start, K, BLOCK)
        if NORM:
            new_squares += (squares[t] + tl.sum(tl.reshape(x * x, (BLOCK // VECTOR, VECTOR)), 1),)
            x = x * gain
        else:
            new_squares += (squares[t],)
        product = tl.sum(tl.reshape(weights * x[None, :], (LINES, BLOCK // VECTOR, VECTOR)), 2)
        if GROUP > 0 and GROUP < K:
            product *= scale
        new_sums += (sums[t] + product,)
    return new_sums, new_squares


@triton.jit
def stream_linear_kernel(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_row: tl.tensor,
    outputs: tl.tensor,
    T: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute ROWS outputs of all T tokens.

    VECTOR  elements of the weights that a thread loads at once
    GROUP   columns of the weights that share a scale in each row; 0: the weights have no scales
    GATED   row `n` of the weights is a gate, and row `n + outputs` its up projection; the result is silu(gate) * up
    NORM    x is divided by its root mean square and multiplied by `norm`; the division follows the matmul, because it
            is one factor per token
    BIAS    the bias is added to the result
    ADD     the values at `out` are added to the result
    PDL     this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
    lines: tl.constexpr = ROWS * 2 if GATED else ROWS
    part = tl.arange(0, lines)
    n = tl.program_id(0) * ROWS + part % ROWS
    # Lines past the last row read that row again, so that no load needs a mask.
    line = tl.minimum(n, outputs - 1) + part // ROWS * outputs
    sums = ()
    squares = ()
    for _ in tl.static_range(T):
        sums += (tl.zeros((lines, BLOCK // VECTOR), tl.float32),)
        squares += (tl.zeros((BLOCK // VECTOR,), tl.float32),)
    lines_ptr = weight_ptr + line.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK)[None, :]
    # The first block of weights is read before the predecessor ends, since that writes x but not the weights.
    weights = _rows_columns(lines_ptr, 0, K, BLOCK)
    if PDL:
        gdc_wait()
    row_scale_ptr = scale_ptr
    if GROUP > 0 and GROUP < K:
        row_scale_ptr += line[:, None] * (K // GROUP)
    sums, squares = _gather(
        *(sums, squares, weights, row_scale_ptr, x_ptr, x_row, norm_ptr, 0, T, K, lines, BLOCK, VECTOR, GROUP, NORM)
    )
    for start in tl.range(BLOCK, K, BLOCK, num_stages=1):
        weights = _rows_columns(lines_ptr, start, K, BLOCK)
        sums, squares = _gather(
            *(sums, squares, weights, row_scale_ptr, x_ptr, x_row, norm_ptr),
            *(start, T, K, lines, BLOCK, VECTOR, GROUP, NORM),
        )
    to = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for t in tl.static_range(T):
        y = tl.sum(sums[t], 1)
        if NORM:
            y *= 1.0 / tl.sqrt_rn(tl.sum(squares[t], 0) / K + eps)
        if GROUP >= K:
            y *= tl.load(scale_ptr + line)
        if BIAS:
            y += tl.load(bias_ptr + line).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.trans(tl.reshape(y, (2, ROWS))))
            y = gate / (1.0 + tl.exp(-gate)) * up
        if ADD:
            y += tl.load(out_ptr + t * out_row + to, mask=to < outputs, other=0.0).to(tl.float32)
        tl.store(out_ptr + t * out_row + to, y.to(out_ptr.dtype.element_ty), mask=to < outputs)
