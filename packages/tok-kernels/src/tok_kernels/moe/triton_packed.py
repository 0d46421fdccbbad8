"""Multiply rows sorted by expert by packed integer weights (grouped GEMM), which are unpacked in registers."""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.linear.triton_packed_gemm import add_product, unpack_words


@triton.jit
def _accumulate(
    acc: tl.tensor,
    word_ptrs: tl.tensor,
    word: tl.tensor,
    words_stride: tl.tensor,
    zero: tl.tensor,
    scale_ptrs: tl.tensor,
    x: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Return `acc + W x` for BLOCK_K columns of the weight rows at `word_ptrs`, which share their scales."""
    if K % BLOCK_K == 0:
        words = tl.load(word_ptrs + word[None, :])
    else:
        words = tl.load(word_ptrs + word[None, :], mask=(word < words_stride)[None, :], other=0)
    weights = unpack_words(words, zero[:, None], BITS, x.dtype == tl.float16, ASM)
    return add_product(acc, weights, x, tl.load(scale_ptrs))


@triton.jit
def packed_grouped_gemm_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    words_ptr: tl.tensor,
    words_stride: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    weight_rows: tl.tensor,
    out_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    tiles: tl.tensor,
    outputs: tl.tensor,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N output features of the BLOCK_M rows of one tile, as `grouped_gemm_kernel` does.

    Grid: `(tiles × ⌈outputs / BLOCK_N⌉,)`, with the output features changing fastest. The phases and the other pointers
    are those of `grouped_gemm_kernel`. Words are unpacked in registers, right before they are multiplied.

    words_ptr            int32 [weight_rows, words_stride], `PackedWeight.words` of all experts
    scale_ptr, zero_ptr  float32 and uint8 [groups, weight_rows]; zero points only if HAS_ZEROS
    K                    input features
    BLOCK_K              input features that are read at a time; they share a scale
    GROUP_SIZE           input features that share a scale; K: all
    ASM                  compiled for a GPU; otherwise for Triton's interpreter
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values_per_word: tl.constexpr = 32 // BITS

    # Find the expert and the rows.
    blocks_n = tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0) // blocks_n
    expert = tl.load(tile_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_ptr + tiles + tile) + tl.arange(0, BLOCK_M)
    present = row < tl.load(tile_ptr + 2 * tiles + tile)
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
    word_ptrs = words_ptr + weight_row.to(tl.int64)[:, None] * words_stride
    up_word_ptrs = word_ptrs + outputs * words_stride
    zero = tl.full((BLOCK_N,), 1 << (BITS - 1), tl.int32)
    up_zero = zero
    if HAS_ZEROS:
        zero = tl.load(zero_ptr + weight_row).to(tl.int32)
        if GATED:
            up_zero = tl.load(zero_ptr + weight_row + outputs).to(tl.int32)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up_acc = acc
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + start, mask=present[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs + start, mask=(start + column < K)[:, None] & present[None, :], other=0.0)
        word = start // values_per_word + tl.arange(0, BLOCK_K // values_per_word)
        scale_ptrs = scale_ptr + start // GROUP_SIZE * weight_rows + weight_row
        acc = _accumulate(acc, word_ptrs, word, words_stride, zero, scale_ptrs, x, K, BLOCK_K, BITS, ASM)
        if GATED:
            scale_ptrs += outputs
            up_acc = _accumulate(
                up_acc, up_word_ptrs, word, words_stride, up_zero, scale_ptrs, x, K, BLOCK_K, BITS, ASM
            )
        if HAS_ZEROS and GROUP_SIZE < K:
            # Read one block ahead, since Triton pipelines no loads of bytes.
            zero_ptrs = zero_ptr + tl.minimum(start + BLOCK_K, K - 1) // GROUP_SIZE * weight_rows + weight_row
            zero = tl.load(zero_ptrs).to(tl.int32)
            if GATED:
                up_zero = tl.load(zero_ptrs + outputs).to(tl.int32)

    # Apply the activation, and store.
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    acc = tl.trans(acc)
    out_ptrs = out_ptr + out_row.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=present[:, None] & (n < outputs)[None, :])
