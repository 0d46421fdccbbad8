"""Multiply by packed integer weights on tensor cores, which read the unpacked weights from registers.

A program computes `LINES` outputs of `TOKENS` tokens, or with SPLIT a partial sum of each (split-K). The last program
of a tile to finish adds the partial sums in a fixed order, so equal inputs give equal bits.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HALVES = tl.constexpr(0x00010001)


@triton.jit
def _negative_offset(zero: tl.tensor, BITS: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """Return the bits of `-(offset + zero)` for `unpack_words`, whose bit pattern adds the offset to q."""
    if HALF:
        return zero * _HALVES + (-0x1BFF1C00)  # two float16 of -(1024 + zero)
    if BITS == 4:
        return zero * _HALVES + (-0x3CFF3D00)  # two bfloat16 of -(128 + zero)
    return zero + (-0x35000000)  # a float32 of -(2**23 + zero)


@triton.jit
def unpack_words(
    words: tl.tensor, zero: tl.tensor, BITS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr
) -> tl.tensor:
    """Return q - zero of int32 words `[R, W]`, in float16 with HALF or else bfloat16, `[R, W * 32 / BITS]`.

    The bits of an unsigned q, inserted into the lowest mantissa bits of a power of two, make that power plus q. For
    example, float16 0x6400 is 1024, and 0x6405 is 1029. Two values come out of a word at a time.
    """
    if ASM:
        if BITS == 4:
            low: tl.constexpr = "0x64006400" if HALF else "0x43004300"
            add: tl.constexpr = "add.rn.f16x2 v, v, $9;" if HALF else "fma.rn.bf16x2 v, v, one, $9;"
            c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                "{ .reg .b32 v, w, one; mov.b32 one, 0x3f803f80;"
                "lop3.b32 v, $8, 0x000f000f, " + low + ", 0xea; " + add + " mov.b32 {$0, $1}, v; shr.u32 w, $8, 4;"
                "lop3.b32 v, w, 0x000f000f, " + low + ", 0xea; " + add + " mov.b32 {$2, $3}, v; shr.u32 w, $8, 8;"
                "lop3.b32 v, w, 0x000f000f, " + low + ", 0xea; " + add + " mov.b32 {$4, $5}, v; shr.u32 w, $8, 12;"
                "lop3.b32 v, w, 0x000f000f, " + low + ", 0xea; " + add + " mov.b32 {$6, $7}, v; }",
                "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
                [words, _negative_offset(zero, BITS, HALF)],
                dtype=(tl.float16,) * 8 if HALF else (tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
        elif HALF:
            c0, c1, c2, c3 = tl.inline_asm_elementwise(
                "{ .reg .b32 v, w; lop3.b32 v, $4, 0x00ff00ff, 0x64006400, 0xea; add.rn.f16x2 v, v, $5;"
                "mov.b32 {$0, $1}, v; shr.u32 w, $4, 8; lop3.b32 v, w, 0x00ff00ff, 0x64006400, 0xea;"
                "add.rn.f16x2 v, v, $5; mov.b32 {$2, $3}, v; }",
                "=h,=h,=h,=h,r,r",
                [words, _negative_offset(zero, BITS, HALF)],
                dtype=(tl.float16,) * 4,
                is_pure=True,
                pack=1,
            )
        else:
            c0, c1, c2, c3 = tl.inline_asm_elementwise(
                "{ .reg .b32 v, w; prmt.b32 v, $4, 0x4b000000, 0x7440; add.rn.f32 v, v, $5;"
                "prmt.b32 w, $4, 0x4b000000, 0x7442; add.rn.f32 w, w, $5; cvt.rn.bf16x2.f32 v, w, v;"
                "mov.b32 {$0, $1}, v; prmt.b32 v, $4, 0x4b000000, 0x7441; add.rn.f32 v, v, $5;"
                "prmt.b32 w, $4, 0x4b000000, 0x7443; add.rn.f32 w, w, $5; cvt.rn.bf16x2.f32 v, w, v;"
                "mov.b32 {$2, $3}, v; }",
                "=h,=h,=h,=h,r,r",
                [words, _negative_offset(zero, BITS, HALF)],
                dtype=(tl.bfloat16,) * 4,
                is_pure=True,
                pack=1,
            )
    else:
        mask: tl.constexpr = (1 << BITS) - 1
        dtype: tl.constexpr = tl.float16 if HALF else tl.bfloat16
        c0 = ((words & mask) - zero).to(dtype)
        c1 = (((words >> 16) & mask) - zero).to(dtype)
        c2 = (((words >> BITS) & mask) - zero).to(dtype)
        c3 = (((words >> (BITS + 16)) & mask) - zero).to(dtype)
        if BITS == 4:
            c4 = (((words >> 8) & mask) - zero).to(dtype)
            c5 = (((words >> 24) & mask) - zero).to(dtype)
            c6 = (((words >> 12) & mask) - zero).to(dtype)
            c7 = (((words >> 28) & mask) - zero).to(dtype)
    pairs: tl.constexpr = 16 // BITS
    if BITS == 4:
        even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
        odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    else:
        even, odd = tl.join(c0, c2), tl.join(c1, c3)
    values = tl.join(even, odd)
    rows: tl.constexpr = words.shape[0]
    chunks: tl.constexpr = words.shape[1] // 4
    values = tl.permute(tl.reshape(values, (rows, chunks, 4, pairs, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(values, (rows, chunks * 8 * pairs))


@triton.jit
def dequantize_kernel(
    words_ptr: tl.tensor,
    words_row: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    group_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """Write LINES rows and BLOCK columns of the dense weight, for rows from `first` to `last`.

    ORDERED  `group_ptr` has the group of each column; else GROUP consecutive columns share a group
    ZEROS    groups have zero points
    ASM      for a GPU; else for Triton's interpreter
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    per_word: tl.constexpr = 32 // BITS
    line = first + tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = (line < last)[:, None]
    word = tl.program_id(1) * (BLOCK // per_word) + tl.arange(0, BLOCK // per_word)
    words = tl.load(
        words_ptr + line.to(tl.int64)[:, None] * words_row + word[None, :],
        mask=inside & (word < words_row)[None, :],
        other=0,
    )
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside &= (column < K)[None, :]
    q = unpack_words(words, tl.zeros((1, 1), tl.int32), BITS, dtype != tl.bfloat16, ASM).to(tl.float32)
    if ORDERED:
        group = tl.load(group_ptr + column, mask=column < K, other=0)
    else:
        group = column // GROUP
    at = group[None, :] * rows + line[:, None]
    if ZEROS:
        q -= tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
    else:
        q -= 1 << (BITS - 1)
    value = q * tl.load(scale_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + line.to(tl.int64)[:, None] * K + column[None, :], value.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens", "splits"])
def packed_dot_kernel(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    tokens: tl.tensor,
    words_ptr: tl.tensor,
    words_row: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_row: tl.tensor,
    outputs: tl.tensor,
    partial_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    splits: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    LINES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute the outputs of LINES rows of the weight for TOKENS tokens, or their partial sums (split-K).

    BLOCK   columns of a `tl.dot`; they share a scale
    SPLIT   `splits` programs divide the columns of a tile; the last to arrive adds their partial sums
    SCALED  scales are applied to the weights, which are then rounded; else to the sums
    GATED   row `n` of the weight is a gate, and row `n + outputs` its up projection; the result is silu(gate) * up
    ZEROS   groups have zero points
    BIAS    the bias is added to the result
    ADD     the values at `out` are added to the result
    ASM     for a GPU; else for Triton's interpreter
    PDL     this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    half: tl.constexpr = dtype == tl.float16
    per_word: tl.constexpr = 32 // BITS
    own: tl.constexpr = LINES // 2 if GATED else LINES
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if GATED:
        # Of 16 lines 8 are gates and 8 their up projections, since a thread's accumulator has lines i and i + 8.
        line = tl.arange(0, LINES)
        n = tile * own + line // 16 * 8 + line % 8
        line = tl.minimum(n, outputs - 1) + line // 8 % 2 * outputs
        rows = 2 * outputs
    else:
        n = tile * LINES + tl.arange(0, LINES)
        line = tl.minimum(n, outputs - 1)
        rows = outputs
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    present = t < tokens
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    first = split * blocks // splits
    last = (split + 1) * blocks // splits
    words_at = words_ptr + line.to(tl.int64)[:, None] * words_row + tl.arange(0, BLOCK // per_word)[None, :]
    x_at = x_ptr + t.to(tl.int64)[:, None] * x_row + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((LINES, TOKENS), tl.float32)
    zero = tl.full((LINES,), 1 << (BITS - 1), tl.int32)
    if ZEROS:
        zero = tl.load(zero_ptr + (first * BLOCK // GROUP if GROUP < K else 0) * rows + line).to(tl.int32)
    if PDL:
        gdc_wait()
    for block in tl.range(first, last, num_stages=STAGES):
        if K % BLOCK == 0:
            words = tl.load(words_at + block * (BLOCK // per_word))
            x = tl.load(x_at + block * BLOCK, mask=present[:, None], other=0.0)
        else:
            there = (block * (BLOCK // per_word) + tl.arange(0, BLOCK // per_word) < words_row)[None, :]
            words = tl.load(words_at + block * (BLOCK // per_word), mask=there, other=0)
            inside = (block * BLOCK + tl.arange(0, BLOCK) < K)[None, :]
            x = tl.load(x_at + block * BLOCK, mask=present[:, None] & inside, other=0.0)
        weights = unpack_words(words, zero[:, None], BITS, half, ASM)
        if GROUP < K:
            scale = tl.load(scale_ptr + block * BLOCK // GROUP * rows + line)
            if ZEROS:
                # Read one block ahead, since Triton pipelines no loads of bytes.
                group = tl.minimum((block + 1) * BLOCK, K - 1) // GROUP
                zero = tl.load(zero_ptr + group * rows + line).to(tl.int32)
            if SCALED:
                weights = (weights.to(tl.float32) * scale[:, None]).to(dtype)
                acc = tl.dot(weights, tl.trans(x), acc)
            else:
                acc += tl.dot(weights, tl.trans(x)) * scale[:, None]
        else:
            acc = tl.dot(weights, tl.trans(x), acc)
    if GROUP >= K:
        acc *= tl.load(scale_ptr + line)[:, None]
    if SPLIT:
        tiles = tl.num_programs(0) * tl.num_programs(2)
        tile_at = tl.program_id(2) * tl.num_programs(0) + tile
        size: tl.constexpr = LINES * TOKENS
        place = tile_at * size + tl.arange(0, LINES)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(partial_ptr + split * tiles * size + place, acc)
        tl.debug_barrier()  # all threads of the program have stored their parts
        if tl.atomic_add(arrived_ptr + tile_at, 1, sem="acq_rel") < splits - 1:
            return
        acc = tl.zeros((LINES, TOKENS), tl.float32)
        for part in tl.range(0, splits, num_stages=1):
            acc += tl.load(partial_ptr + part * tiles * size + place, cache_modifier=".cg")
        tl.store(arrived_ptr + tile_at, 0)
    if BIAS:
        acc += tl.load(bias_ptr + line).to(tl.float32)[:, None]
    if GATED:
        halves = tl.permute(tl.reshape(acc, (LINES // 16, 2, 8, TOKENS)), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        acc = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (own, TOKENS))
        n = tile * own + tl.arange(0, own)
    inside = (n < outputs)[:, None] & present[None, :]
    to = out_ptr + t.to(tl.int64)[None, :] * out_row + n[:, None]
    if ADD:
        acc += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, acc.to(dtype), mask=inside)
