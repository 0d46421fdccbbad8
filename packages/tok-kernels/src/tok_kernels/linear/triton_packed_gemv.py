"""Multiply one token by packed 4-bit weights (GEMV): each program reads its weight rows once, block by block.

A 4-bit q, inserted into certain mantissa bits of a float32, makes 16 + q or 256 + q without a conversion. A dot product
thus exceeds `q · x` by 16 or 256 times the sum of x. This excess is the same for all rows, and is subtracted before the
scale is applied:

    (16 + q0) · x0 + (256 + q1) · x1 = (q0 · x0 + q1 · x1) + (16 · x0 + 256 · x1)

`pack_columns` defines which column each value of a word belongs to. Of a word's values 0 to 7, value 2p begins at bit
4p, and value 2p + 1 at bit 16 + 4p. In word c of a chunk of four, they belong to columns 8p + 2c and 8p + 2c + 1.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The mantissa bit of a float32 at which each value of a word is inserted. A q from bit 19 on makes 16 + q, one from bit
# 15 on makes 256 + q. Three values take bit 15, so that five different shifts of a word serve all eight values.
_MANTISSA_BIT: tl.constexpr = tl.constexpr((19, 19, 15, 15, 19, 19, 15, 19))


@triton.jit
def _split_pairs(pairs: tl.tensor, FP16: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return the two 16-bit floats of each int32, as float32."""
    if FP16:
        low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _offset_of(VALUE: tl.constexpr) -> tl.constexpr:
    """Return by how much `_biased_value` exceeds q, for value VALUE of a word."""
    return 16.0 if _MANTISSA_BIT[VALUE] == 19 else 256.0


@triton.jit
def _biased_value(words: tl.tensor, VALUE: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """Return q + 16 or q + 256 (`_offset_of`) as float32, for value VALUE of each word."""
    first_bit: tl.constexpr = VALUE // 2 * 4 + VALUE % 2 * 16
    left_shift: tl.constexpr = _MANTISSA_BIT[VALUE] - first_bit
    if left_shift >= 0:
        shifted = words << left_shift
    else:
        shifted = words >> (-left_shift)
    if ASM:
        # LOP3 is one instruction; `&` with the mask and `|` with float32 16 or 256 become two.
        operands: tl.constexpr = "0x00780000, 0x41800000" if _MANTISSA_BIT[VALUE] == 19 else "0x00078000, 0x43800000"
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, " + operands + ", 0xea;", "=r,r", [shifted], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        mask: tl.constexpr = 0xF << _MANTISSA_BIT[VALUE]
        bits = (shifted & mask) | (0x41800000 if _MANTISSA_BIT[VALUE] == 19 else 0x43800000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_x(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    squares: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP16: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Load a block of x, times the norm's weight, and return four values.

    x        tuple of 8 tensors `[words]`, for the 8 values of a word
    excess   `[words]`, the excess of a word's dot product
    x_sum    `[words]`, sum of the x of a word
    squares  `[words]`, sum of squares, added to the argument
    """
    word = tl.arange(0, BLOCK_K // 8)
    pair = start // 2 + word // 4 * 16 + word % 4
    values = ()
    excess = tl.zeros((BLOCK_K // 8,), tl.float32)
    x_sum = tl.zeros((BLOCK_K // 8,), tl.float32)
    for p in tl.static_range(4):
        if K % BLOCK_K == 0:
            loaded = tl.load(x_ptr + pair + 4 * p)
        else:
            loaded = tl.load(x_ptr + pair + 4 * p, mask=pair + 4 * p < K // 2, other=0)
        even, odd = _split_pairs(loaded, FP16)
        if HAS_NORM:
            squares += even * even + odd * odd
            if K % BLOCK_K == 0:
                norm_weight = tl.load(norm_ptr + pair + 4 * p)
            else:
                norm_weight = tl.load(norm_ptr + pair + 4 * p, mask=pair + 4 * p < K // 2, other=0)
            norm_even, norm_odd = _split_pairs(norm_weight, FP16)
            even *= norm_even
            odd *= norm_odd
        excess += _offset_of(2 * p) * even + _offset_of(2 * p + 1) * odd
        x_sum += even + odd
        values += (even, odd)
    return values, excess, x_sum, squares


@triton.jit
def _dot_words(words: tl.tensor, x: tl.tuple, ASM: tl.constexpr) -> tl.tensor:
    """Return the dot product of each word with its x, `[ROWS, words]`, which includes the excess."""
    product = _biased_value(words, 0, ASM) * x[0][None, :]
    for v in tl.static_range(1, 8):
        product += _biased_value(words, v, ASM) * x[v][None, :]
    return product


@triton.jit
def _load_words(
    word_ptrs: tl.tensor, start: tl.tensor, words_stride: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """Load the words of BLOCK_K columns of each weight row; zeros past the end."""
    first_word = start // 8
    if K % BLOCK_K == 0:
        return tl.load(word_ptrs + first_word, eviction_policy="evict_first")
    inside = (first_word + tl.arange(0, BLOCK_K // 8) < words_stride)[None, :]
    return tl.load(word_ptrs + first_word, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _accumulate(
    sums: tl.tensor,
    squares: tl.tensor,
    words: tl.tensor,
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    weight_row: tl.tensor,
    weight_rows: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP16: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ASM: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Add a block of columns to the sums `[ROWS, chunks]` and to the sum of squares; a chunk is four words."""
    chunks: tl.constexpr = BLOCK_K // 32
    x, excess, x_sum, squares = _load_x(x_ptr, norm_ptr, squares, start, K, BLOCK_K, FP16, HAS_NORM)
    product = tl.sum(tl.reshape(_dot_words(words, x, ASM), (ROWS, chunks, 4)), 2)
    excess = tl.sum(tl.reshape(excess, (chunks, 4)), 1)
    x_sum = tl.sum(tl.reshape(x_sum, (chunks, 4)), 1)
    if GROUP_SIZE < K:
        group = tl.minimum((start + tl.arange(0, chunks) * 32) // GROUP_SIZE, (K - 1) // GROUP_SIZE)
        offset = group[None, :] * weight_rows + weight_row[:, None]
    else:
        offset = tl.broadcast_to(weight_row[:, None], (ROWS, chunks))
    if HAS_ZEROS:
        product -= excess[None, :] + tl.load(zero_ptr + offset).to(tl.float32) * x_sum[None, :]
    else:
        product -= (excess + 8 * x_sum)[None, :]
    return sums + product * tl.load(scale_ptr + offset), squares


@triton.jit
def packed_gemv_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    words_ptr: tl.tensor,
    words_stride: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP16: tl.constexpr,
    GATED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of one token. Grid: `(⌈outputs / BLOCK_N⌉,)`.

    1. Read the first block of words while the predecessor still runs: it writes x, but not the weights.
    2. For each block of BLOCK_K columns, add the products of q and x, without their excess, to the sums.
    3. Add up the sums; then apply norm, bias, activation and residual.

    x_ptr                int32 [K / 2], pairs of 16-bit floats: float16 if FP16, otherwise bfloat16
    norm_ptr             int32 [K / 2], pairs of the weight of the RMS norm of x. Its division follows the matmul,
                         because it is one factor
    words_ptr            int32 [rows, words_stride], `PackedWeight.words`; GATED: row n is a gate and row n + outputs
                         its up projection, and the result is silu(gate) * up
    scale_ptr, zero_ptr  float32 and uint8 [groups, rows]; zero points only if HAS_ZEROS
    bias_ptr             [rows]
    out_ptr              [outputs]; ADD_RESIDUAL adds to its values
    GROUP_SIZE           columns that share a scale; K: all
    ASM                  compiled for a GPU; otherwise for Triton's interpreter
    PDL                  this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()

    # Read the first block of words.
    ROWS: tl.constexpr = BLOCK_N * 2 if GATED else BLOCK_N
    lane = tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + lane % BLOCK_N
    # Outputs past the last one read its weights again, so that no load needs a mask.
    weight_row = tl.minimum(n, outputs - 1) + lane // BLOCK_N * outputs
    weight_rows = outputs * 2 if GATED else outputs
    word_ptrs = words_ptr + weight_row.to(tl.int64)[:, None] * words_stride + tl.arange(0, BLOCK_K // 8)[None, :]
    sums = tl.zeros((ROWS, BLOCK_K // 32), tl.float32)
    squares = tl.zeros((BLOCK_K // 8,), tl.float32)
    words = _load_words(word_ptrs, 0, words_stride, K, BLOCK_K)
    if PDL:
        gdc_wait()

    # Multiply.
    sums, squares = _accumulate(
        *(sums, squares, words, x_ptr, norm_ptr, scale_ptr, zero_ptr, weight_row, weight_rows, 0),
        *(K, GROUP_SIZE, ROWS, BLOCK_K, FP16, HAS_ZEROS, HAS_NORM, ASM),
    )
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
        words = _load_words(word_ptrs, start, words_stride, K, BLOCK_K)
        sums, squares = _accumulate(
            *(sums, squares, words, x_ptr, norm_ptr, scale_ptr, zero_ptr, weight_row, weight_rows, start),
            *(K, GROUP_SIZE, ROWS, BLOCK_K, FP16, HAS_ZEROS, HAS_NORM, ASM),
        )

    # Apply norm, bias, activation and residual.
    y = tl.sum(sums, 1)
    if HAS_NORM:
        y *= 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / K + eps)
    if HAS_BIAS:
        y += tl.load(bias_ptr + weight_row).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(y, (2, BLOCK_N))))
        y = gate / (1.0 + tl.exp(-gate)) * up
    out_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if ADD_RESIDUAL:
        y += tl.load(out_ptr + out_n, mask=out_n < outputs, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_n, y.to(out_ptr.dtype.element_ty), mask=out_n < outputs)
