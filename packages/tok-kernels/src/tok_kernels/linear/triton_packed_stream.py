"""Multiply one token by packed 4-bit weights (GEMV): each program reads its rows of the weights once, block by block.

A 4-bit q in certain mantissa bits of a float32 makes 16 + q or 256 + q. Each dot product thus exceeds `q · x` by
16 or 256 times the sum of x. This excess is the same for all rows, and is subtracted before the scale is applied:

    (16 + q0) · x0 + (256 + q1) · x1 = (q0 · x0 + q1 · x1) + (16 · x0 + 256 · x1)
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _halves(pairs: tl.tensor, HALF: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return the two 16-bit floats of each int32, as float32."""
    if HALF:
        low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _field(words: tl.tensor, SHIFT: tl.constexpr, BIT: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """Return q + 16 (BIT 19) or q + 256 (BIT 15), for words in which q begins at that bit once they are shifted.

    SHIFT  to the left; negative: to the right
    """
    if SHIFT >= 0:
        moved = words << SHIFT
    else:
        moved = words >> (-SHIFT)
    if ASM:
        # LOP3 is one instruction; `&` and `|` become two.
        operands: tl.constexpr = "0x00780000, 0x41800000" if BIT == 19 else "0x00078000, 0x43800000"
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, " + operands + ", 0xea;", "=r,r", [moved], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = (moved & (0xF << BIT)) | (0x41800000 if BIT == 19 else 0x43800000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _inputs(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    squares: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return x (times the norm's weight) in the order of the words, one tensor for each value of a word.

    Also return, for each word, the excess of its dot product, the sum of x, and the sum of squares.
    """
    word = tl.arange(0, BLOCK // 8)
    at = start // 2 + word // 4 * 16 + word % 4
    values = ()
    extra = tl.zeros((BLOCK // 8,), tl.float32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for p in tl.static_range(4):
        if K % BLOCK == 0:
            loaded = tl.load(x_ptr + at + 4 * p)
        else:
            loaded = tl.load(x_ptr + at + 4 * p, mask=at + 4 * p < K // 2, other=0)
        even, odd = _halves(loaded, HALF)
        if NORM:
            squares += even * even + odd * odd
            if K % BLOCK == 0:
                gain = tl.load(norm_ptr + at + 4 * p)
            else:
                gain = tl.load(norm_ptr + at + 4 * p, mask=at + 4 * p < K // 2, other=0)
            gain_even, gain_odd = _halves(gain, HALF)
            even *= gain_even
            odd *= gain_odd
        extra += (256.0 if p == 1 or p == 3 else 16.0) * even + (256.0 if p == 1 else 16.0) * odd
        total += even + odd
        values += (even, odd)
    return values, extra, total, squares


@triton.jit
def _dot_words(words: tl.tensor, x: tl.tuple, ASM: tl.constexpr) -> tl.tensor:
    """Return the dot product of each word and its inputs, `[LINES, W]`, with the excess that `_inputs` returns."""
    product = _field(words, 19, 19, ASM) * x[0][None, :]
    product += _field(words, 3, 19, ASM) * x[1][None, :]
    product += _field(words, 11, 15, ASM) * x[2][None, :]
    product += _field(words, -5, 15, ASM) * x[3][None, :]
    product += _field(words, 11, 19, ASM) * x[4][None, :]
    product += _field(words, -5, 19, ASM) * x[5][None, :]
    product += _field(words, 3, 15, ASM) * x[6][None, :]
    product += _field(words, -9, 19, ASM) * x[7][None, :]
    return product


@triton.jit
def _words(at: tl.tensor, start: tl.tensor, words_row: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the words of a block of columns of each line; zeros past the end."""
    first = start // 8
    if K % BLOCK == 0:
        return tl.load(at + first, eviction_policy="evict_first")
    inside = (first + tl.arange(0, BLOCK // 8) < words_row)[None, :]
    return tl.load(at + first, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _add(
    sums: tl.tensor,
    squares: tl.tensor,
    words: tl.tensor,
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    line: tl.tensor,
    rows: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ZEROS: tl.constexpr,
    NORM: tl.constexpr,
    ASM: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Add a block of columns to the sums `[LINES, chunks]`; a chunk is four words."""
    chunks: tl.constexpr = BLOCK // 32
    x, extra, total, squares = _inputs(x_ptr, norm_ptr, squares, start, K, BLOCK, HALF, NORM)
    product = tl.sum(tl.reshape(_dot_words(words, x, ASM), (LINES, chunks, 4)), 2)
    extra = tl.sum(tl.reshape(extra, (chunks, 4)), 1)
    total = tl.sum(tl.reshape(total, (chunks, 4)), 1)
    if GROUP < K:
        group = tl.minimum((start + tl.arange(0, chunks) * 32) // GROUP, (K - 1) // GROUP)
        at = group[None, :] * rows + line[:, None]
    else:
        at = tl.broadcast_to(line[:, None], (LINES, chunks))
    if ZEROS:
        product -= extra[None, :] + tl.load(zero_ptr + at).to(tl.float32) * total[None, :]
    else:
        product -= (extra + 8 * total)[None, :]
    return sums + product * tl.load(scale_ptr + at), squares


@triton.jit
def packed_stream_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    words_ptr: tl.tensor,
    words_row: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    GATED: tl.constexpr,
    ZEROS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute ROWS outputs of one token; x and norm are pairs of 16-bit numbers.

    HALF   x and norm are float16, else bfloat16
    GATED  row `n` of the weights is a gate, and row `n + outputs` its up projection; the result is silu(gate) * up
    ZEROS  groups have zero points
    NORM   x is divided by its root mean square and multiplied by `norm`; the division follows the matmul, because it
           is one factor per token
    BIAS   the bias is added to the result
    ADD    the values at `out` are added to the result
    ASM    for a GPU; else for Triton's interpreter
    PDL    this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
    lines: tl.constexpr = ROWS * 2 if GATED else ROWS
    part = tl.arange(0, lines)
    n = tl.program_id(0) * ROWS + part % ROWS
    line = tl.minimum(n, outputs - 1) + part // ROWS * outputs
    rows = outputs * 2 if GATED else outputs
    at = words_ptr + line.to(tl.int64)[:, None] * words_row + tl.arange(0, BLOCK // 8)[None, :]
    sums = tl.zeros((lines, BLOCK // 32), tl.float32)
    squares = tl.zeros((BLOCK // 8,), tl.float32)
    # The first block of weights is read before the predecessor ends, since that writes x but not the weights.
    words = _words(at, 0, words_row, K, BLOCK)
    if PDL:
        gdc_wait()
    sums, squares = _add(
        *(sums, squares, words, x_ptr, norm_ptr, scale_ptr, zero_ptr, line, rows, 0),
        *(K, GROUP, lines, BLOCK, HALF, ZEROS, NORM, ASM),
    )
    for start in tl.range(BLOCK, K, BLOCK, num_stages=1):
        words = _words(at, start, words_row, K, BLOCK)
        sums, squares = _add(
            *(sums, squares, words, x_ptr, norm_ptr, scale_ptr, zero_ptr, line, rows, start),
            *(K, GROUP, lines, BLOCK, HALF, ZEROS, NORM, ASM),
        )
    y = tl.sum(sums, 1)
    if NORM:
        y *= 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / K + eps)
    if BIAS:
        y += tl.load(bias_ptr + line).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(y, (2, ROWS))))
        y = gate / (1.0 + tl.exp(-gate)) * up
    to = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ADD:
        y += tl.load(out_ptr + to, mask=to < outputs, other=0.0).to(tl.float32)
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=to < outputs)
