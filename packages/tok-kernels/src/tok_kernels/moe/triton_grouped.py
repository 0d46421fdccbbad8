"""Multiply rows that are sorted by expert by their experts' weights (grouped GEMM), and sum each token's results.

Weights are the first operand of `tl.dot` (swap AB). So Hopper's tensor cores multiply 64 output features by any number
of rows at a time, and 8-bit weights that are converted to 16 bits stay in registers. W8A8 converts nothing. Only the
weights of experts that have rows are read. Each program reads its expert and rows from `SortedPairs`, so the grid
depends on the number of tokens only.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.linear.triton_packed_gemm import add_product


@triton.jit
def _load_weights(
    weight_ptr: tl.tensor,
    weight_row: tl.tensor,
    column: tl.tensor,
    inputs: tl.tensor,
    EVEN_K: tl.constexpr,
) -> tl.tensor:
    """Load columns of some rows of the weights, `[rows, columns]`; 0 past the last column."""
    weight_ptrs = weight_ptr + weight_row.to(tl.int64)[:, None] * inputs + column[None, :]
    if EVEN_K:
        return tl.load(weight_ptrs)
    return tl.load(weight_ptrs, mask=(column < inputs)[None, :], other=0.0)


@triton.jit
def _accumulate(
    acc: tl.tensor,
    w: tl.tensor,
    x: tl.tensor,
    scale_ptr: tl.tensor,
    weight_row: tl.tensor,
    start: tl.tensor,
    inputs: tl.tensor,
    x_scale: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    W8A8: tl.constexpr,
) -> tl.tensor:
    """Return `acc + w @ x`; with a GROUP_SIZE, `w @ x` is multiplied by the scales of its columns first."""
    if GROUP_SIZE > 0:
        scale = tl.load(scale_ptr + weight_row * tl.cdiv(inputs, GROUP_SIZE) + start // GROUP_SIZE)
        if W8A8:
            acc += tl.dot(w, x) * scale[:, None] * x_scale[None, :]
        else:
            acc = add_product(acc, w.to(x.dtype), x, scale)
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


# Values that change from step to step must not recompile the kernel.
@triton.jit(do_not_specialize=["tiles", "x_scale_group_stride"])
def grouped_gemm_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_scale_group_stride: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    tiles: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    W8A8: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N output features of BLOCK_M rows of a tile.

    Grid: `(tiles × (TILE_ROWS / BLOCK_M) × ⌈outputs / BLOCK_N⌉,)`, with the output features changing fastest.

    1. Find the tile's expert and the program's rows; a program without rows returns.
    2. Compute which row of x each row reads, and which row of `out` it writes.
    3. Accumulate `W xᵀ` over blocks of BLOCK_K input features; GATED accumulates gate and up projections.
    4. Multiply by the scales of rows, apply the gated activation, and store.

    x_ptr        GATED: [tokens, inputs], one row per token; otherwise [P, inputs], the sorted rows
    x_scale_ptr  W8A8: float32, scale of each row of x, or of each group of columns (`x_scale_group_stride`) and row
    weight_ptr   GATED: [experts × 2 × outputs, inputs]; otherwise [experts × outputs, inputs]
    scale_ptr    float32 [weight rows, ⌈inputs / GROUP_SIZE⌉], one for GROUP_SIZE columns; W8A8 and a GROUP_SIZE of 0:
                 float32 [weight rows]
    out_ptr      [P, outputs]; GATED: `silu(gate) * up` of the sorted rows; otherwise results in the order of pairs
    pair_ptr     int32 [P], `SortedPairs.pair_R`
    tile_ptr     int32 [3, tiles], `SortedPairs.tile_3S`
    EVEN_K       `inputs` is a multiple of BLOCK_K
    W8A8         x has the weights' 8-bit dtype
    PDL          this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    # Find the expert and the rows.
    blocks_n = tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0) // blocks_n // (TILE_ROWS // BLOCK_M)
    expert = tl.load(tile_ptr + tile)
    if expert < 0:
        return
    first_row = tl.load(tile_ptr + tiles + tile) + tl.program_id(0) // blocks_n % (TILE_ROWS // BLOCK_M) * BLOCK_M
    rows_end = tl.load(tile_ptr + 2 * tiles + tile)
    if first_row >= rows_end:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    present = row < rows_end
    pair = tl.load(pair_ptr + row, mask=present, other=0)
    if GATED:
        x_row, out_row, expert_rows = pair // TOP_K, row, 2 * outputs
    else:
        x_row, out_row, expert_rows = row, pair, outputs
    n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Output features past the last one read its weights again, so that no load needs a mask for them.
    weight_row = expert * expert_rows + tl.minimum(n, outputs - 1)

    # Multiply.
    column = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + column[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if W8A8 and x_ptr.dtype.element_ty == tl.int8 else tl.float32)
    up_acc = acc
    x_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    if W8A8:
        x_scale = tl.load(x_scale_ptr + x_row, mask=present, other=0.0)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=NUM_STAGES):
        if W8A8 and GROUP_SIZE > 0:
            x_scale = tl.load(x_scale_ptr + start // GROUP_SIZE * x_scale_group_stride + x_row, mask=present, other=0.0)
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=present[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs + start, mask=(start + column < inputs)[:, None] & present[None, :], other=0.0)
        w = _load_weights(weight_ptr, weight_row, start + column, inputs, EVEN_K)
        acc = _accumulate(acc, w, x, scale_ptr, weight_row, start, inputs, x_scale, GROUP_SIZE, W8A8)
        if GATED:
            up_row = weight_row + outputs
            w = _load_weights(weight_ptr, up_row, start + column, inputs, EVEN_K)
            up_acc = _accumulate(up_acc, w, x, scale_ptr, up_row, start, inputs, x_scale, GROUP_SIZE, W8A8)

    # Apply the scales of rows and the activation, and store.
    acc = tl.trans(acc).to(tl.float32)
    up_acc = tl.trans(up_acc).to(tl.float32)
    if W8A8 and GROUP_SIZE == 0:
        acc *= x_scale[:, None] * tl.load(scale_ptr + weight_row)[None, :]
        if GATED:
            up_acc *= x_scale[:, None] * tl.load(scale_ptr + weight_row + outputs)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    out_ptrs = out_ptr + out_row.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=present[:, None] & (n < outputs)[None, :])


@triton.jit
def combine_kernel(
    y_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    size: tl.tensor,
    first_expert: tl.tensor,
    local_experts: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N columns of a token's weighted sum over its TOP_K experts. Grid: `(tokens, ⌈size / BLOCK_N⌉)`.

    y_ptr                        [tokens, TOP_K, size], results of the experts
    weight_ptr                   float32 [tokens, TOP_K]
    expert_ptr                   int32 [tokens, TOP_K]
    out_ptr                      [tokens, size], with `out_stride` between tokens; ADD_RESIDUAL adds to its values
    first_expert, local_experts  first of the local experts, and their number; results of others are not read
    PDL                          this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < size
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOP_K):
        local_expert = tl.load(expert_ptr + token * TOP_K + k) - first_expert
        is_local = inside & (local_expert >= 0) & (local_expert < local_experts)
        y = tl.load(y_ptr + (token * TOP_K + k) * size + column, mask=is_local, other=0.0).to(tl.float32)
        total += y * tl.load(weight_ptr + token * TOP_K + k)
    out_ptrs = out_ptr + token * out_stride + column
    if ADD_RESIDUAL:
        total += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)
