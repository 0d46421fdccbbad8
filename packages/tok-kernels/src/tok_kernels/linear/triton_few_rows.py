"""Multiply few rows of activations by a weight (skinny GEMM), which is read once, at the memory's bandwidth.

Tensor cores compute `W xᵀ` (swap AB): the weight fills their tiles of at least 64 rows, and the activations are the
narrow second operand. Both operands have 16 bits, or both have 8.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options
from tok_kernels.linear.quantized_weights import QuantizedRows, ScaledWeight
from tok_kernels.linear.triton_config import MAX_SPLIT_PROGRAMS, FewRowsLaunch
from tok_kernels.linear.triton_qkv import Rotation, load_angles, rotated_rows, store_rotated
from tok_kernels.zeroed_counters import ZeroedCounters

_CACHE_LINE_BYTES = tl.constexpr(128)  # of the L2 cache


@triton.jit
def _load_weights(
    weight_ptrs: tl.tensor, block: tl.tensor, K: tl.tensor, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr
) -> tl.tensor:
    """Load BLOCK_K columns of each weight row, which are read only once; zeros past the end."""
    if EVEN_K:
        return tl.load(weight_ptrs + block * BLOCK_K, eviction_policy="evict_first")
    inside = tl.arange(0, BLOCK_K) < K - block * BLOCK_K
    return tl.load(weight_ptrs + block * BLOCK_K, mask=inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch(row_ptrs: tl.tensor, first: tl.tensor, end: tl.tensor, PREFETCH: tl.constexpr) -> None:
    """Prefetch up to PREFETCH columns of each row, from column `first` on and before `end`, into the L2 cache."""
    line_columns: tl.constexpr = _CACHE_LINE_BYTES // (row_ptrs.dtype.element_ty.primitive_bitwidth // 8)
    column = tl.minimum(first + tl.arange(0, PREFETCH // line_columns) * line_columns, end - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0",
        "=r,l",
        [(row_ptrs[:, None] + column[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def gated_rows(outputs: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Return the BLOCK_N weight rows of a tile of gated outputs: gates, and their up projections `outputs` rows below.

    The rows have the order of `_paired_outputs`.
    """
    n, second = _paired_outputs(outputs, BLOCK_N)
    return n + second * outputs


@triton.jit
def _paired_outputs(outputs: tl.tensor, BLOCK_N: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the output of each of a tile's BLOCK_N rows, two rows to an output, and whether it is the second one.

    Of 16 rows, 8 are first and 8 second ones, since a thread's accumulator has rows i and i + 8. Outputs past the last
    one read its weights again, so that no load needs a mask.
    """
    lane = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * (BLOCK_N // 2) + lane // 16 * 8 + lane % 8
    return tl.minimum(n, outputs - 1), lane // 8 % 2


@triton.jit
def _split_pairs(y: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the first and second rows of y, in the order of `_paired_outputs`, `[BLOCK_N / 2, BLOCK_M]` each."""
    first, second = tl.split(tl.permute(tl.reshape(y, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
    return tl.reshape(first, (BLOCK_N // 2, BLOCK_M)), tl.reshape(second, (BLOCK_N // 2, BLOCK_M))


@triton.jit
def silu_and_mul_rows(y: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr) -> tl.tensor:
    """Return silu(gate) * up, `[BLOCK_N / 2, BLOCK_M]`, for rows of y in the order of `gated_rows`."""
    gate, up = _split_pairs(y, BLOCK_N, BLOCK_M)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def partial_sum_ptrs(
    partial_ptr: tl.tensor, split: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """Return the pointers to a split's partial sums of this program's tile, `[BLOCK_N, BLOCK_M]` (split-K).

    The array is float32 or int32 [splits, tiles, BLOCK_N, BLOCK_M], with a grid as that of `few_rows_kernel`.
    """
    tiles = tl.num_programs(0) * tl.num_programs(2)
    tile_index = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tile_size: tl.constexpr = BLOCK_N * BLOCK_M
    offset = tile_index * tile_size + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return partial_ptr + split * tiles * tile_size + offset


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["position_ptr", "cache_row_ptr"])
def few_rows_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    x_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_token_stride: tl.tensor,
    out_column_stride: tl.tensor,
    partial_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    rope: tl.tuple,
    position_ptr: tl.tensor,
    cache_row_ptr: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    K: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALED: tl.constexpr,
    ROUNDED: tl.constexpr,
    GATED: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute the outputs of BLOCK_N weight rows for BLOCK_M tokens, or their partial sums (split-K).

    Grid: `(⌈weight rows / BLOCK_N⌉, SPLIT_K, ⌈tokens / BLOCK_M⌉)`.

    1. Prefetch the first PREFETCH columns of the weight rows into the L2 cache, while the predecessor still runs.
    2. Accumulate `W xᵀ` over the split's blocks of BLOCK_K columns.
    3. With several splits, store the partial sums; the last program of a tile to arrive adds them in order.
    4. Apply scales, bias, activation or rotation, and residual, and store.

    x_ptr              [tokens, K], with `x_stride` between tokens
    weight_ptr         [rows, K]; GATED: row n is a gate and row n + outputs its up projection, and the result is
                       silu(gate) * up
    x_scale_ptr        SCALED: float32 [tokens], scales of an 8-bit x
    scale_ptr          SCALED: float32 [rows], scales of an 8-bit weight
    bias_ptr           [rows]
    out_ptr            [tokens, outputs], with two strides; ADD_RESIDUAL adds to its values
    partial_ptr        float32 or int32 [SPLIT_K, tiles, BLOCK_N, BLOCK_M], partial sums
    counters_ptr       int32 [tiles], number of programs that have finished a tile, 0 before and after the kernel
    rope               `RopeArguments` of a QKV projection, of which an output is a pair (i, i + HALF) of a head. `out`
                       receives the rotated queries, and the cache keys and values; `Rotation` describes position_ptr
                       and cache_row_ptr. None, with HALF 0: another layer
    EVEN_K             K is a multiple of BLOCK_K
    ROUNDED            round the sums to the weight's dtype before bias, activation and residual
    PDL                this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()

    # Find the weight rows, and prefetch them.
    tile_outputs: tl.constexpr = BLOCK_N // 2 if GATED or HALF > 0 else BLOCK_N
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * tile_outputs + tl.arange(0, tile_outputs)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    present = token < tokens
    is_output = present[:, None] & (n < outputs)[None, :]
    if GATED:
        weight_row = gated_rows(outputs, BLOCK_N)
    elif HALF > 0:
        pair, second_row = _paired_outputs(outputs, BLOCK_N)
        weight_row = rotated_rows(pair, second_row, HALF)
    else:
        # Outputs past the last one read its weights again, so that no load needs a mask.
        weight_row = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), outputs - 1)
    row_ptrs = weight_ptr + weight_row.to(tl.int64) * K
    blocks = tl.cdiv(K, BLOCK_K)
    first_block = split * blocks // SPLIT_K
    blocks_end = (split + 1) * blocks // SPLIT_K
    if PDL:
        if PREFETCH > 0:
            _prefetch(row_ptrs, first_block * BLOCK_K, tl.minimum(blocks_end * BLOCK_K, K), PREFETCH)
        gdc_wait()

    # Multiply. Positions are loaded before, so that the angles need not wait for them afterwards.
    if HALF > 0:
        position = tl.load(position_ptr + token, mask=present, other=0)
    column = tl.arange(0, BLOCK_K)
    weight_ptrs = row_ptrs[:, None] + column[None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    is_int8: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if is_int8 else tl.float32)
    for block in tl.range(first_block, blocks_end, num_stages=NUM_STAGES):
        inside = present[:, None]
        if not EVEN_K:
            inside &= (column < K - block * BLOCK_K)[None, :]
        x = tl.load(x_ptrs + block * BLOCK_K, mask=inside, other=0.0)
        weights = _load_weights(weight_ptrs, block, K, BLOCK_K, EVEN_K)
        acc = tl.dot(weights, tl.trans(x), acc, out_dtype=acc.dtype)

    if HALF > 0:
        cos, sin = load_angles(rope, position[:, None], n[None, :], is_output, HALF)

    # Add the partial sums of all splits.
    if SPLIT_K > 1:
        tl.store(partial_sum_ptrs(partial_ptr, split, BLOCK_N, BLOCK_M), acc)
        tl.debug_barrier()  # all threads of the program have stored their partial sums
        tile_index = tl.program_id(2) * tl.num_programs(0) + tile
        if tl.atomic_add(counters_ptr + tile_index, 1, sem="acq_rel") < SPLIT_K - 1:
            return
        acc = tl.zeros((BLOCK_N, BLOCK_M), acc.dtype)
        for other_split in tl.static_range(SPLIT_K):
            acc += tl.load(partial_sum_ptrs(partial_ptr, other_split, BLOCK_N, BLOCK_M), cache_modifier=".cg")
        tl.store(counters_ptr + tile_index, 0)

    # Apply scales, bias, activation or rotation, and residual.
    y = acc.to(tl.float32)
    if SCALED:
        x_scale = tl.load(x_scale_ptr + token, mask=present, other=0.0)
        y *= tl.load(scale_ptr + weight_row)[:, None] * x_scale[None, :]
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    if ROUNDED:
        y = y.to(dtype).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
        if ROUNDED:
            y = y.to(dtype).to(tl.float32)
    if HALF > 0:
        first, second = _split_pairs(y, BLOCK_N, BLOCK_M)
        store_rotated(
            *(tl.trans(first), tl.trans(second), cos, sin, rope, cache_row_ptr, out_ptr, out_token_stride),
            *(token.to(tl.int64)[:, None], n[None, :], is_output, HALF),
        )
    else:
        if GATED:
            y = silu_and_mul_rows(y, BLOCK_N, BLOCK_M)
        out_ptrs = out_ptr + token.to(tl.int64)[:, None] * out_token_stride + n[None, :] * out_column_stride
        y = tl.trans(y)
        if ADD_RESIDUAL:
            y += tl.load(out_ptrs, mask=is_output, other=0.0).to(tl.float32)
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_output)


_counters = ZeroedCounters(MAX_SPLIT_PROGRAMS)


def launch_few_rows(
    launch: FewRowsLaunch,
    x: Tensor | QuantizedRows,
    weight: Tensor | ScaledWeight,
    bias: Tensor | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
    rounded: bool = False,
    rotation: Rotation | None = None,
) -> Tensor:
    """Launch the few-row GEMM; the arguments after `launch` are those of `linear`, already checked.

    x is quantised if the weight is. With `rounded`, the GEMM's result is rounded before bias, activation and residual.
    A QKV projection has a `rotation`.
    """
    if isinstance(x, QuantizedRows):
        x_TK, x_scale_T, tokens, dtype = x.values_TK, x.scale_TG, x.tokens, x.dtype
    else:
        x_TK = x if x.stride(1) == 1 else x.contiguous()
        x_scale_T, tokens, dtype = x_TK, len(x), x.dtype
    values_NK, scale_N = (weight, weight) if isinstance(weight, Tensor) else (weight.values_NK, weight.scale_NG)
    weight_rows, inputs = values_NK.shape
    paired = gated or rotation is not None
    outputs = weight_rows // 2 if paired else weight_rows
    out_TN = residual_TN if rotation is None else rotation.out
    if out_TN is None:
        out_TN = torch.empty((tokens, outputs), dtype=dtype, device=x_TK.device)
    tile_outputs = launch.block_n // 2 if paired else launch.block_n
    tiles = triton.cdiv(outputs, tile_outputs), triton.cdiv(tokens, launch.block_m)
    partial = counters = values_NK
    if launch.splits > 1:
        size = launch.splits * tiles[0] * tiles[1] * launch.block_n * launch.block_m
        partial_dtype = torch.int32 if values_NK.dtype == torch.int8 else torch.float32
        partial = torch.empty(size, dtype=partial_dtype, device=x_TK.device)
        counters = _counters.of(x_TK.device)
    few_rows_kernel[(tiles[0], launch.splits, tiles[1])](
        *(x_TK, x_TK.stride(0), x_scale_T, values_NK, scale_N, values_NK if bias is None else bias.contiguous()),
        *(out_TN, *out_TN.stride(), partial, counters),
        *((None, x_TK, x_TK) if rotation is None else (rotation.arguments, rotation.position, rotation.cache_row)),
        *(tokens, outputs, inputs),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        NUM_STAGES=launch.stages,
        SPLIT_K=launch.splits,
        PREFETCH=launch.prefetch,
        EVEN_K=inputs % launch.block_k == 0,
        SCALED=not isinstance(weight, Tensor),
        ROUNDED=rounded,
        GATED=gated,
        HALF=0 if rotation is None else rotation.half,
        HAS_BIAS=bias is not None,
        ADD_RESIDUAL=residual_TN is not None,
        num_warps=launch.warps,
        **pdl_options(x_TK.device),
    )
    return out_TN
