"""Compute linear layers for one token or two (GEMV): each program reads its weight rows once, block by block.

A program computes BLOCK_N outputs of all tokens without tensor cores, since reading the weights takes most of the time.
The partial sums of threads are added once, at the end, in a fixed order.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.linear.triton_qkv import load_angles, rotated_rows, store_rotated


@triton.jit
def load_columns(ptr: tl.tensor, start: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """Load BLOCK_K entries of a vector from column `start` on, float32; 0 past the end."""
    column = start + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        return tl.load(ptr + column).to(tl.float32)
    return tl.load(ptr + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def load_weight_block(weight_ptrs: tl.tensor, start: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """Load BLOCK_K columns of weight rows from column `start` on, float32 `[ROWS, BLOCK_K]`; 0 past the end."""
    if K % BLOCK_K == 0:
        return tl.load(weight_ptrs + start, eviction_policy="evict_first").to(tl.float32)
    inside = (start + tl.arange(0, BLOCK_K) < K)[None, :]
    return tl.load(weight_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def accumulate(
    sums: tl.tensor,
    squares: tl.tensor,
    weights: tl.tensor,
    row_scale_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    norm_ptr: tl.tensor,
    start: tl.tensor,
    TOKENS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Add a block of columns to each token's sums `[ROWS, BLOCK_K // VECTOR]`, and to its sum of squares (HAS_NORM).

    A thread first sums the VECTOR products of the elements that it loads at once, so that it holds fewer accumulators.
    If rows have several scales, this sum is multiplied by the scale of its group of columns.
    """
    if GROUP_SIZE > 0 and GROUP_SIZE < K:
        column = start + tl.arange(0, BLOCK_K // VECTOR) * VECTOR
        scale = tl.load(row_scale_ptr + column // GROUP_SIZE, mask=(column < K)[None, :], other=0.0)
    if HAS_NORM:
        norm_weight = load_columns(norm_ptr, start, K, BLOCK_K)
    new_sums = ()
    new_squares = ()
    for t in tl.static_range(TOKENS):
        x = load_columns(x_ptr + t * x_stride, start, K, BLOCK_K)
        if HAS_NORM:
            new_squares += (squares[t] + tl.sum(tl.reshape(x * x, (BLOCK_K // VECTOR, VECTOR)), 1),)
            x = x * norm_weight
        else:
            new_squares += (squares[t],)
        product = tl.sum(tl.reshape(weights * x[None, :], (ROWS, BLOCK_K // VECTOR, VECTOR)), 2)
        if GROUP_SIZE > 0 and GROUP_SIZE < K:
            product *= scale
        new_sums += (sums[t] + product,)
    return new_sums, new_squares


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "cache_row_ptr"])
def gemv_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    outputs: tl.tensor,
    rope: tl.tuple,
    position_ptr: tl.tensor,
    cache_row_ptr: tl.tensor,
    TOKENS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GATED: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of all TOKENS tokens. Grid: `(⌈outputs / BLOCK_N⌉,)`.

    1. Read the first block of weights while the predecessor still runs: it writes x, but not the weights.
    2. For each block of BLOCK_K columns, add the products of weights and x to the sums, and x² to the sum of squares.
    3. For each token, add up the sums; then apply norm, scale, bias, activation or rotation, and residual.

    x_ptr       [TOKENS, K], with `x_stride` between tokens
    norm_ptr    [K], weight of the RMS norm of x. Its division follows the matmul, because it is one factor per token
    weight_ptr  [rows, K]; GATED: row n is a gate and row n + outputs its up projection; the result is silu(gate) * up
    scale_ptr   float32 [rows, K / GROUP_SIZE], if GROUP_SIZE columns share a scale; GROUP_SIZE 0: no scales
    bias_ptr    [rows]
    out_ptr     [TOKENS, outputs], with `out_stride` between tokens; ADD_RESIDUAL adds to its values
    rope        `RopeArguments` of a QKV projection, of which an output is a pair (i, i + HALF) of a head. `out`
                receives the rotated queries, and the cache keys and values; `Rotation` describes position_ptr and
                cache_row_ptr. None, with HALF 0: another layer
    VECTOR      weights that a thread loads at once
    PDL         this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()

    # Read the first block of weights.
    ROWS: tl.constexpr = BLOCK_N * 2 if GATED or HALF > 0 else BLOCK_N
    lane = tl.arange(0, ROWS)
    # Outputs past the last one read its weights again, so that no load needs a mask.
    n = tl.minimum(tl.program_id(0) * BLOCK_N + lane % BLOCK_N, outputs - 1)
    weight_row = rotated_rows(n, lane // BLOCK_N, HALF) if HALF > 0 else n + lane // BLOCK_N * outputs
    out_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = ()
    squares = ()
    for _ in tl.static_range(TOKENS):
        sums += (tl.zeros((ROWS, BLOCK_K // VECTOR), tl.float32),)
        squares += (tl.zeros((BLOCK_K // VECTOR,), tl.float32),)
    weight_ptrs = weight_ptr + weight_row.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    weights = load_weight_block(weight_ptrs, 0, K, BLOCK_K)
    if PDL:
        gdc_wait()
    positions = ()
    if HALF > 0:
        for t in tl.static_range(TOKENS):
            positions += (tl.load(position_ptr + t),)

    # Multiply.
    row_scale_ptr = scale_ptr
    if GROUP_SIZE > 0 and GROUP_SIZE < K:
        row_scale_ptr += weight_row[:, None] * (K // GROUP_SIZE)
    sums, squares = accumulate(
        *(sums, squares, weights, row_scale_ptr, x_ptr, x_stride, norm_ptr, 0),
        *(TOKENS, K, ROWS, BLOCK_K, VECTOR, GROUP_SIZE, HAS_NORM),
    )
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
        weights = load_weight_block(weight_ptrs, start, K, BLOCK_K)
        sums, squares = accumulate(
            *(sums, squares, weights, row_scale_ptr, x_ptr, x_stride, norm_ptr, start),
            *(TOKENS, K, ROWS, BLOCK_K, VECTOR, GROUP_SIZE, HAS_NORM),
        )

    # Apply norm, scale, bias, activation or rotation, and residual.
    angles = ()
    if HALF > 0:
        for t in tl.static_range(TOKENS):
            angles += (load_angles(rope, positions[t], out_n, out_n < outputs, HALF),)
    for t in tl.static_range(TOKENS):
        y = tl.sum(sums[t], 1)
        if HAS_NORM:
            y *= 1.0 / tl.sqrt_rn(tl.sum(squares[t], 0) / K + eps)
        if GROUP_SIZE >= K:
            y *= tl.load(scale_ptr + weight_row)
        if HAS_BIAS:
            y += tl.load(bias_ptr + weight_row).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.trans(tl.reshape(y, (2, BLOCK_N))))
            y = gate / (1.0 + tl.exp(-gate)) * up
        if HALF > 0:
            first, second = tl.split(tl.trans(tl.reshape(y, (2, BLOCK_N))))
            store_rotated(
                *(first, second, angles[t][0], angles[t][1], rope, cache_row_ptr, out_ptr, out_stride),
                *(out_n * 0 + t, out_n, out_n < outputs, HALF),
            )
        else:
            if ADD_RESIDUAL:
                y += tl.load(out_ptr + t * out_stride + out_n, mask=out_n < outputs, other=0.0).to(tl.float32)
            tl.store(out_ptr + t * out_stride + out_n, y.to(out_ptr.dtype.element_ty), mask=out_n < outputs)
