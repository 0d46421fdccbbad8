"""Multiply rows that are sorted by expert by their experts' matrices (grouped GEMM), and add up each token's results.

The weights are the first operand of `tl.dot`, so Hopper's tensor cores multiply any number of rows by 64 lines at a
time, and 8-bit weights that are converted to 16 bits stay in registers. W8A8 converts nothing. Only matrices of experts
that have rows are read. Each program reads its expert and rows from `SortedPairs`, so the launch depends on the number
of tokens only.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _weights(
    weight_ptr: tl.tensor,
    line: tl.tensor,
    column: tl.tensor,
    inputs: tl.tensor,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Load columns of some lines of the matrix, `[lines, columns]`; 0 past the last column."""
    at = weight_ptr + line.to(tl.int64)[:, None] * inputs + column[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(column < inputs)[None, :], other=0.0)


@triton.jit
def _accumulate(
    sums: tl.tensor,
    w: tl.tensor,
    x: tl.tensor,
    scale_ptr: tl.tensor,
    line: tl.tensor,
    start: tl.tensor,
    inputs: tl.tensor,
    x_scale: tl.tensor,
    GROUP: tl.constexpr,
    W8A8: tl.constexpr,
) -> tl.tensor:
    """Return `sums + w @ x`; with a GROUP, `w @ x` is multiplied by the scales of its columns first."""
    w = w.to(x.dtype)
    if GROUP > 0:
        scale = tl.load(scale_ptr + line * tl.cdiv(inputs, GROUP) + start // GROUP)
        products = tl.dot(w, x, input_precision="ieee") * scale[:, None]
        sums += products * x_scale[None, :] if W8A8 else products
    else:
        sums = tl.dot(w, x, sums, input_precision="ieee", out_dtype=sums.dtype)
    return sums


# Values that change from step to step must not recompile the kernel.
@triton.jit(do_not_specialize=["tiles", "x_scale_group"])
def grouped_gemm_kernel(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_scale_group: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    tiles: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    C: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    W8A8: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute LINES outputs of ROWS rows of a tile.

    C        experts of a token
    TILE     rows of a tile, a multiple of ROWS
    BLOCK    inputs that are read at a time
    EVEN     `inputs` is a multiple of BLOCK
    GATED    x has a row for each token, and results are `silu(gate) * up`, in the order of sorted rows. Else x has
             sorted rows, and results are in the order of pairs
    SCALED   the weights are 8-bit values with a scale for each line (GROUP 0) or for GROUP columns of each line
    W8A8     x has the weights' dtype, with a scale for each row (GROUP 0) or for GROUP columns of each row
    PDL      this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    parts = tl.cdiv(outputs, LINES)
    tile = tl.program_id(0) // parts // (TILE // ROWS)
    expert = tl.load(tile_ptr + tile)
    if expert < 0:
        return
    first = tl.load(tile_ptr + tiles + tile) + tl.program_id(0) // parts % (TILE // ROWS) * ROWS
    stop = tl.load(tile_ptr + 2 * tiles + tile)
    if first >= stop:
        return
    row = first + tl.arange(0, ROWS)
    inside = row < stop
    pair = tl.load(pair_ptr + row, mask=inside, other=0)
    if GATED:
        source, to, height = pair // C, row, 2 * outputs
    else:
        source, to, height = row, pair, outputs
    n = tl.program_id(0) % parts * LINES + tl.arange(0, LINES)
    # Lines past the last one read that line again, so that no load needs a mask for them.
    line = expert * height + tl.minimum(n, outputs - 1)
    column = tl.arange(0, BLOCK)
    x_at = x_ptr + source.to(tl.int64)[None, :] * x_row + column[:, None]
    sums = tl.zeros((LINES, ROWS), tl.int32 if W8A8 and x_ptr.dtype.element_ty == tl.int8 else tl.float32)
    ups = sums
    x_scale = tl.full((ROWS,), 1.0, tl.float32)
    if W8A8:
        x_scale = tl.load(x_scale_ptr + source, mask=inside, other=0.0)
    for start in tl.range(0, inputs, BLOCK, num_stages=STAGES):
        if W8A8 and GROUP > 0:
            x_scale = tl.load(x_scale_ptr + start // GROUP * x_scale_group + source, mask=inside, other=0.0)
        if EVEN:
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
        else:
            x = tl.load(x_at + start, mask=(start + column < inputs)[:, None] & inside[None, :], other=0.0)
        w = _weights(weight_ptr, line, start + column, inputs, EVEN)
        sums = _accumulate(sums, w, x, scale_ptr, line, start, inputs, x_scale, GROUP, W8A8)
        if GATED:
            w = _weights(weight_ptr, line + outputs, start + column, inputs, EVEN)
            ups = _accumulate(ups, w, x, scale_ptr, line + outputs, start, inputs, x_scale, GROUP, W8A8)
    sums = tl.trans(sums).to(tl.float32)
    ups = tl.trans(ups).to(tl.float32)
    if W8A8 and GROUP == 0:
        sums *= x_scale[:, None]
        ups *= x_scale[:, None]
    if SCALED and GROUP == 0:
        sums *= tl.load(scale_ptr + line)[None, :]
        if GATED:
            ups *= tl.load(scale_ptr + line + outputs)[None, :]
    if GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    at = out_ptr + to.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (n < outputs)[None, :])


@triton.jit
def combine_kernel(
    y_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_row: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    held: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add up BLOCK columns of the C results of a token, in order, each multiplied by its weight.

    ADD     the values at `out` are added to the sum
    held    number of experts from `first` on that have results; those of others are not read
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(C):
        place = tl.load(expert_ptr + token * C + c) - first
        there = inside & (place >= 0) & (place < held)
        y = tl.load(y_ptr + (token * C + c) * size + column, mask=there, other=0.0).to(tl.float32)
        total += y * tl.load(weight_ptr + token * C + c)
    at = out_ptr + token * out_row + column
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)
