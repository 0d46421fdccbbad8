"""Multiply rows sorted by expert by matrices of packed integers (grouped GEMM), which are unpacked in registers."""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.linear.triton_packed_dot import unpack_words


@triton.jit
def _accumulate(
    sums: tl.tensor,
    words_at: tl.tensor,
    word: tl.tensor,
    words_row: tl.tensor,
    zero: tl.tensor,
    scale_at: tl.tensor,
    x: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Return `sums + W x` for BLOCK columns of the lines at `words_at`, which share their scales."""
    if K % BLOCK == 0:
        words = tl.load(words_at + word[None, :])
    else:
        words = tl.load(words_at + word[None, :], mask=(word < words_row)[None, :], other=0)
    weights = unpack_words(words, zero[:, None], BITS, x.dtype == tl.float16, ASM)
    if GROUP < K:
        sums += tl.dot(weights, x) * tl.load(scale_at)[:, None]
    else:
        sums = tl.dot(weights, x, sums)
    return sums


@triton.jit
def packed_grouped_gemm_kernel(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    words_ptr: tl.tensor,
    words_row: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    lines: tl.tensor,
    out_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    tiles: tl.tensor,
    outputs: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GATED: tl.constexpr,
    ZEROS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute LINES outputs of the ROWS rows of one tile, as `grouped_gemm_kernel`.

    lines  lines of all experts' matrices; scales and zero points are `[groups, lines]`
    K      inputs
    BLOCK  inputs that are read at a time; they share a scale
    GROUP  inputs that share a scale; K: all
    ZEROS  groups have zero points
    ASM    for a GPU; else for Triton's interpreter
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    per_word: tl.constexpr = 32 // BITS
    parts = tl.cdiv(outputs, LINES)
    tile = tl.program_id(0) // parts
    expert = tl.load(tile_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_ptr + tiles + tile) + tl.arange(0, ROWS)
    inside = row < tl.load(tile_ptr + 2 * tiles + tile)
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
    words_at = words_ptr + line.to(tl.int64)[:, None] * words_row
    up_words_at = words_at + outputs * words_row
    zero = tl.full((LINES,), 1 << (BITS - 1), tl.int32)
    up_zero = zero
    if ZEROS:
        zero = tl.load(zero_ptr + line).to(tl.int32)
        if GATED:
            up_zero = tl.load(zero_ptr + line + outputs).to(tl.int32)
    sums = tl.zeros((LINES, ROWS), tl.float32)
    ups = sums
    for start in tl.range(0, K, BLOCK, num_stages=STAGES):
        if K % BLOCK == 0:
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
        else:
            x = tl.load(x_at + start, mask=(start + column < K)[:, None] & inside[None, :], other=0.0)
        word = start // per_word + tl.arange(0, BLOCK // per_word)
        scale_at = scale_ptr + start // GROUP * lines + line
        sums = _accumulate(sums, words_at, word, words_row, zero, scale_at, x, K, BLOCK, GROUP, BITS, ASM)
        if GATED:
            scale_at += outputs
            ups = _accumulate(ups, up_words_at, word, words_row, up_zero, scale_at, x, K, BLOCK, GROUP, BITS, ASM)
        if ZEROS and GROUP < K:
            # Read one block ahead, since Triton pipelines no loads of bytes.
            at = zero_ptr + tl.minimum(start + BLOCK, K - 1) // GROUP * lines + line
            zero = tl.load(at).to(tl.int32)
            if GATED:
                up_zero = tl.load(at + outputs).to(tl.int32)
    if GROUP >= K:
        sums *= tl.load(scale_ptr + line)[:, None]
        if GATED:
            ups *= tl.load(scale_ptr + line + outputs)[:, None]
    if GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    sums = tl.trans(sums)
    at = out_ptr + to.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (n < outputs)[None, :])
