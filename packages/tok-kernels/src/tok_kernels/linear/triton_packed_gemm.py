"""Multiply by packed integer weights on tensor cores (W4A16, W8A16), and dequantise such weights.

Words are unpacked in registers, from which tensor cores read the weights as their first operand (swap AB). With
split-K, the last program of a tile adds the partial sums in a fixed order, so equal inputs give equal bits.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.linear.triton_few_rows import gated_rows, partial_sum_ptrs, silu_and_mul_rows

_BOTH_HALVES = tl.constexpr(0x00010001)  # times a 16-bit number: that number in both halves of a word


@triton.jit
def _negative_offset(zero: tl.tensor, BITS: tl.constexpr, FP16: tl.constexpr) -> tl.tensor:
    """Return the bits of `-(offset + zero)`; the offset is the power of two that `unpack_words` adds to q."""
    if FP16:
        return zero * _BOTH_HALVES + (-0x1BFF1C00)  # two float16 of -(1024 + zero)
    if BITS == 4:
        return zero * _BOTH_HALVES + (-0x3CFF3D00)  # two bfloat16 of -(128 + zero)
    return zero + (-0x35000000)  # a float32 of -(2**23 + zero)


@triton.jit
def _unpack_4_bits(words: tl.tensor, negative_offset: tl.tensor, FP16: tl.constexpr) -> tl.tuple:
    """Return `q - zero` of the eight 4-bit values of each word, in the order of `pack_columns`, as 16-bit floats."""
    power: tl.constexpr = "0x64006400" if FP16 else "0x43004300"  # two float16 of 1024, or two bfloat16 of 128
    add: tl.constexpr = "add.rn.f16x2 v, v, $9;" if FP16 else "fma.rn.bf16x2 v, v, one, $9;"
    return tl.inline_asm_elementwise(
        "{ .reg .b32 v, w, one; mov.b32 one, 0x3f803f80;"
        "lop3.b32 v, $8, 0x000f000f, " + power + ", 0xea; " + add + " mov.b32 {$0, $1}, v; shr.u32 w, $8, 4;"
        "lop3.b32 v, w, 0x000f000f, " + power + ", 0xea; " + add + " mov.b32 {$2, $3}, v; shr.u32 w, $8, 8;"
        "lop3.b32 v, w, 0x000f000f, " + power + ", 0xea; " + add + " mov.b32 {$4, $5}, v; shr.u32 w, $8, 12;"
        "lop3.b32 v, w, 0x000f000f, " + power + ", 0xea; " + add + " mov.b32 {$6, $7}, v; }",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, negative_offset],
        dtype=(tl.float16,) * 8 if FP16 else (tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _unpack_8_bits(words: tl.tensor, negative_offset: tl.tensor, FP16: tl.constexpr) -> tl.tuple:
    """Return `q - zero` of the four 8-bit values of each word, in the order of `pack_columns`, as 16-bit floats."""
    if FP16:
        # 0x6400 is 1024.
        values = tl.inline_asm_elementwise(
            "{ .reg .b32 v, w; lop3.b32 v, $4, 0x00ff00ff, 0x64006400, 0xea; add.rn.f16x2 v, v, $5;"
            "mov.b32 {$0, $1}, v; shr.u32 w, $4, 8; lop3.b32 v, w, 0x00ff00ff, 0x64006400, 0xea;"
            "add.rn.f16x2 v, v, $5; mov.b32 {$2, $3}, v; }",
            "=h,=h,=h,=h,r,r",
            [words, negative_offset],
            dtype=(tl.float16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        # 0x4b000000 is a float32 of 2²³: the mantissa of a bfloat16 has too few bits for q.
        values = tl.inline_asm_elementwise(
            "{ .reg .b32 v, w; prmt.b32 v, $4, 0x4b000000, 0x7440; add.rn.f32 v, v, $5;"
            "prmt.b32 w, $4, 0x4b000000, 0x7442; add.rn.f32 w, w, $5; cvt.rn.bf16x2.f32 v, w, v;"
            "mov.b32 {$0, $1}, v; prmt.b32 v, $4, 0x4b000000, 0x7441; add.rn.f32 v, v, $5;"
            "prmt.b32 w, $4, 0x4b000000, 0x7443; add.rn.f32 w, w, $5; cvt.rn.bf16x2.f32 v, w, v;"
            "mov.b32 {$2, $3}, v; }",
            "=h,=h,=h,=h,r,r",
            [words, negative_offset],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=1,
        )
    return values


@triton.jit
def _interpreted_values(words: tl.tensor, zero: tl.tensor, BITS: tl.constexpr, FP16: tl.constexpr) -> tl.tuple:
    """Return what `_unpack_4_bits` and `_unpack_8_bits` do, without inline assembly."""
    dtype: tl.constexpr = tl.float16 if FP16 else tl.bfloat16
    mask: tl.constexpr = (1 << BITS) - 1
    values = ()
    for p in tl.static_range(16 // BITS):
        even, odd = words >> (BITS * p), words >> (BITS * p + 16)
        values += (((even & mask) - zero).to(dtype), ((odd & mask) - zero).to(dtype))
    return values


@triton.jit
def unpack_words(
    words: tl.tensor, zero: tl.tensor, BITS: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr
) -> tl.tensor:
    """Return `q - zero` of int32 words `[R, W]`: float16 with FP16, otherwise bfloat16, `[R, W × 32 / BITS]`.

    The bits of an unsigned q, inserted into the lowest mantissa bits of a power of two, make that power plus q. For
    example, float16 0x6400 is 1024, and 0x6405 is 1029. One instruction extracts two values of a word.
    """
    if ASM:
        negative_offset = _negative_offset(zero, BITS, FP16)
        if BITS == 4:
            v = _unpack_4_bits(words, negative_offset, FP16)
        else:
            v = _unpack_8_bits(words, negative_offset, FP16)
    else:
        v = _interpreted_values(words, zero, BITS, FP16)
    # In word c of a chunk of four, values 2p and 2p + 1 belong to columns 8p + 2c and 8p + 2c + 1.
    pairs: tl.constexpr = 16 // BITS
    if BITS == 4:
        even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
        odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    else:
        even, odd = tl.join(v[0], v[2]), tl.join(v[1], v[3])
    values = tl.join(even, odd)
    rows: tl.constexpr = words.shape[0]
    chunks: tl.constexpr = words.shape[1] // 4
    values = tl.permute(tl.reshape(values, (rows, chunks, 4, pairs, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(values, (rows, chunks * 8 * pairs))


@triton.jit
def add_product(acc: tl.tensor, weights: tl.tensor, x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return `acc + scale · (weights @ x)`, for weights that were converted in registers and have a scale per row.

    This must not become `tl.dot(weights, x, acc)`: Triton 3.6 then lets products run while the next block's weights are
    unpacked into registers that these products still read. On an H200 that 14 processes shared, up to 13 of 343 such
    launches gave wrong sums; with this function none of 865,000 did.
    """
    return acc + tl.dot(weights, x, input_precision="ieee") * scale[:, None]


@triton.jit
def dequantize_kernel(
    words_ptr: tl.tensor,
    words_stride: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    group_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    first_row: tl.tensor,
    rows_end: tl.tensor,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUP_INDEX: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """Dequantise BLOCK_N rows and BLOCK_K columns of the weight's rows from `first_row` to `rows_end`.

    Grid: `(⌈(rows_end − first_row) / BLOCK_N⌉, ⌈K / BLOCK_K⌉)`.

    words_ptr            int32 [rows, words_stride], `PackedWeight.words`
    scale_ptr, zero_ptr  float32 and uint8 [groups, rows]; zero points only if HAS_ZEROS
    group_ptr            int32 [K], group of each column (GROUP_INDEX); otherwise GROUP_SIZE consecutive columns are one
    out_ptr              [rows, K], `(q − zero) · scale`
    ASM                  compiled for a GPU; otherwise for Triton's interpreter
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values_per_word: tl.constexpr = 32 // BITS
    row = first_row + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < rows_end)[:, None]
    word = tl.program_id(1) * (BLOCK_K // values_per_word) + tl.arange(0, BLOCK_K // values_per_word)
    words = tl.load(
        words_ptr + row.to(tl.int64)[:, None] * words_stride + word[None, :],
        mask=inside & (word < words_stride)[None, :],
        other=0,
    )
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside &= (column < K)[None, :]
    q = unpack_words(words, tl.zeros((1, 1), tl.int32), BITS, dtype != tl.bfloat16, ASM).to(tl.float32)
    if GROUP_INDEX:
        group = tl.load(group_ptr + column, mask=column < K, other=0)
    else:
        group = column // GROUP_SIZE
    offset = group[None, :] * rows + row[:, None]
    if HAS_ZEROS:
        q -= tl.load(zero_ptr + offset, mask=inside, other=0).to(tl.float32)
    else:
        q -= 1 << (BITS - 1)
    weight = q * tl.load(scale_ptr + offset, mask=inside, other=0.0)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * K + column[None, :], weight.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens", "splits"])
def packed_gemm_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    words_ptr: tl.tensor,
    words_stride: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    outputs: tl.tensor,
    partial_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    splits: tl.tensor,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute the outputs of BLOCK_N weight rows for BLOCK_M tokens, or their partial sums (split-K).

    Grid: `(⌈weight rows / BLOCK_N⌉, splits, ⌈tokens / BLOCK_M⌉)`.

    1. For each of the split's blocks of BLOCK_K columns: load words and x, unpack the words, and multiply.
    2. SPLIT: store the partial sums; the last program of a tile to arrive adds them in order.
    3. Apply bias, activation and residual, and store.

    x_ptr                [tokens, K], with `x_stride` between tokens
    words_ptr            int32 [rows, words_stride], `PackedWeight.words`; GATED: row n is a gate and row n + outputs
                         its up projection, and the result is silu(gate) * up
    scale_ptr, zero_ptr  float32 and uint8 [groups, rows]; zero points only if HAS_ZEROS
    bias_ptr             [rows]
    out_ptr              [tokens, outputs], with `out_stride` between tokens; ADD_RESIDUAL adds to its values
    partial_ptr          float32 [splits, tiles, BLOCK_N, BLOCK_M], partial sums
    counters_ptr         int32 [tiles], number of programs that have finished a tile, 0 before and after the kernel
    BLOCK_K              columns of a `tl.dot`; they share a scale
    ASM                  compiled for a GPU; otherwise for Triton's interpreter
    PDL                  this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()

    # Find the weight rows, the tokens and the split's blocks.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    fp16: tl.constexpr = dtype == tl.float16
    values_per_word: tl.constexpr = 32 // BITS
    block_words: tl.constexpr = BLOCK_K // values_per_word
    tile_outputs: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * tile_outputs + tl.arange(0, tile_outputs)
    if GATED:
        weight_row = gated_rows(outputs, BLOCK_N)
        weight_rows = 2 * outputs
    else:
        # Outputs past the last one read its weights again, so that no load needs a mask.
        weight_row = tl.minimum(n, outputs - 1)
        weight_rows = outputs
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    present = token < tokens
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first_block = split * blocks // splits
    blocks_end = (split + 1) * blocks // splits
    word_ptrs = words_ptr + weight_row.to(tl.int64)[:, None] * words_stride + tl.arange(0, block_words)[None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    zero = tl.full((BLOCK_N,), 1 << (BITS - 1), tl.int32)
    if HAS_ZEROS:
        first_group = first_block * BLOCK_K // GROUP_SIZE if GROUP_SIZE < K else 0
        zero = tl.load(zero_ptr + first_group * weight_rows + weight_row).to(tl.int32)
    if GROUP_SIZE >= K:
        scale = tl.load(scale_ptr + weight_row)
    if PDL:
        gdc_wait()

    # Multiply.
    for block in tl.range(first_block, blocks_end, num_stages=NUM_STAGES):
        if K % BLOCK_K == 0:
            words = tl.load(word_ptrs + block * block_words)
            x = tl.load(x_ptrs + block * BLOCK_K, mask=present[:, None], other=0.0)
        else:
            is_word = (block * block_words + tl.arange(0, block_words) < words_stride)[None, :]
            words = tl.load(word_ptrs + block * block_words, mask=is_word, other=0)
            is_column = (block * BLOCK_K + tl.arange(0, BLOCK_K) < K)[None, :]
            x = tl.load(x_ptrs + block * BLOCK_K, mask=present[:, None] & is_column, other=0.0)
        weights = unpack_words(words, zero[:, None], BITS, fp16, ASM)
        if GROUP_SIZE < K:
            scale = tl.load(scale_ptr + block * BLOCK_K // GROUP_SIZE * weight_rows + weight_row)
            if HAS_ZEROS:
                # Read one block ahead, since Triton pipelines no loads of bytes.
                next_group = tl.minimum((block + 1) * BLOCK_K, K - 1) // GROUP_SIZE
                zero = tl.load(zero_ptr + next_group * weight_rows + weight_row).to(tl.int32)
        acc = add_product(acc, weights, tl.trans(x), scale)

    # Add the partial sums of all splits.
    if SPLIT:
        tl.store(partial_sum_ptrs(partial_ptr, split, BLOCK_N, BLOCK_M), acc)
        tl.debug_barrier()  # all threads of the program have stored their partial sums
        tile_index = tl.program_id(2) * tl.num_programs(0) + tile
        if tl.atomic_add(counters_ptr + tile_index, 1, sem="acq_rel") < splits - 1:
            return
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for other_split in tl.range(0, splits, num_stages=1):
            acc += tl.load(partial_sum_ptrs(partial_ptr, other_split, BLOCK_N, BLOCK_M), cache_modifier=".cg")
        tl.store(counters_ptr + tile_index, 0)

    # Apply bias, activation and residual.
    if HAS_BIAS:
        acc += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    if GATED:
        acc = silu_and_mul_rows(acc, BLOCK_N, BLOCK_M)
    is_output = (n < outputs)[:, None] & present[None, :]
    out_ptrs = out_ptr + token.to(tl.int64)[None, :] * out_stride + n[:, None]
    if ADD_RESIDUAL:
        acc += tl.load(out_ptrs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(dtype), mask=is_output)
