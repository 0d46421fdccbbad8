"""Compute the experts of a few tokens without sorting pairs (GEMV): each program reads its weight rows once.

One kernel computes `silu(gate) * up` of each pair, and one the weighted sum of each token's experts. As in the GEMV of
linear layers, no tensor cores are needed, and 8-bit weights are converted faster than in a grouped GEMM.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options, power_of_two
from tok_kernels.linear.quantized_weights import ScaledWeight
from tok_kernels.linear.triton_config import VECTOR, GemvLaunch
from tok_kernels.linear.triton_gemv import accumulate, load_weight_block
from tok_kernels.moe.interface import Routing


def expert_gemv_launch(tokens: int, weight_bytes: int, inputs: int, *, gated: bool) -> GemvLaunch:
    """Return the launch for weights of one byte or two, whose `inputs` are x if `gated`, else all of a token's h.

    Measured on an H200 with the experts of Qwen3-30B-A3B.
    """
    if weight_bytes > 1:
        launch = GemvLaunch(2, 1024, 4) if gated else GemvLaunch(8, 4096, 8)
    elif gated or tokens > 1:
        launch = GemvLaunch(4, 2048, 4, 2 * VECTOR)
    else:
        launch = GemvLaunch(8, 4096, 8, 2 * VECTOR)
    return replace(launch, block_k=max(launch.vector, min(launch.block_k, power_of_two(inputs))))


def gated_expert_gemv(
    launch: GemvLaunch, x_TN: Tensor, routing: Routing, gate_up: Tensor | ScaledWeight, local: range, h_PF: Tensor
) -> None:
    """Write `silu(gate) * up` of each pair's expert to `h`, pairs token by token; pairs of other experts are left out.

    launch  its block_n counts outputs, of which each reads a gate row and an up row
    """
    values, scale, group = _operand(gate_up)
    pairs, outputs = h_PF.shape
    _gated_kernel[(triton.cdiv(outputs, launch.block_n), pairs)](
        *(x_TN, x_TN.stride(0), values, scale, routing.expert_TC, h_PF, outputs, local.start, len(local)),
        TOP_K=routing.expert_TC.shape[1],
        K=x_TN.shape[1],
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        VECTOR=launch.vector,
        GROUP_SIZE=group,
        num_warps=launch.warps,
        **pdl_options(x_TN.device),
    )


def combining_expert_gemv(
    launch: GemvLaunch,
    h_PF: Tensor,
    routing: Routing,
    down: Tensor | ScaledWeight,
    local: range,
    out_TN: Tensor,
    *,
    add: bool,
) -> None:
    """Write the weighted sum of the down projections of each token's experts to `out`, or `add` it to `out`.

    launch  its block_k counts inputs of all experts of a token, one expert after the other
    """
    values, scale, group = _operand(down)
    (tokens, outputs), inputs = out_TN.shape, h_PF.shape[1]
    _combining_kernel[(triton.cdiv(outputs, launch.block_n), tokens)](
        *(h_PF, values, scale, routing.expert_TC, routing.weight_TC, out_TN, out_TN.stride(0), outputs),
        *(local.start, len(local)),
        TOP_K=routing.expert_TC.shape[1],
        K=inputs,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        VECTOR=launch.vector,
        GROUP_SIZE=group,
        ADD_RESIDUAL=add,
        num_warps=launch.warps,
        **pdl_options(out_TN.device),
    )


def _operand(weight: Tensor | ScaledWeight) -> tuple[Tensor, Tensor, int]:
    """Return a weight's values, its scales, and the columns that share a scale; 0: there are no scales."""
    if isinstance(weight, Tensor):
        return weight, weight, 0
    return weight.values_NK, weight.scale_NG, weight.group or weight.values_NK.shape[1]


@triton.jit
def _gated_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    first_expert: tl.tensor,
    local_experts: tl.tensor,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of a pair. Grid: `(⌈outputs / BLOCK_N⌉, pairs)`.

    x_ptr                        [tokens, K], with `x_stride` between tokens
    weight_ptr                   [local_experts × 2 × outputs, K]: gate rows, then up rows of each expert
    scale_ptr                    float32 [weight rows, K / GROUP_SIZE]; GROUP_SIZE 0: no scales
    expert_ptr                   int32 [pairs]
    out_ptr                      [pairs, outputs]
    first_expert, local_experts  first of the local experts, and their number; pairs of others are left out
    VECTOR                       weights that a thread loads at once
    PDL                          this kernel may start before its predecessor ends
    """
    if PDL:
        # The next kernel may start once the experts are selected, since it reads them without waiting.
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(expert_ptr + pair) - first_expert
    if expert < 0 or expert >= local_experts:
        return
    ROWS: tl.constexpr = 2 * BLOCK_N
    lane = tl.arange(0, ROWS)
    # Outputs past the last one read its weights again, so that no load needs a mask.
    n = tl.minimum(tl.program_id(0) * BLOCK_N + lane % BLOCK_N, outputs - 1)
    weight_row = expert * 2 * outputs + n + lane // BLOCK_N * outputs
    weight_ptrs = weight_ptr + weight_row.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    row_scale_ptr = scale_ptr
    if GROUP_SIZE > 0 and GROUP_SIZE < K:
        row_scale_ptr += weight_row[:, None] * (K // GROUP_SIZE)
    x_ptr += (pair // TOP_K).to(tl.int64) * x_stride
    sums = (tl.zeros((ROWS, BLOCK_K // VECTOR), tl.float32),)
    squares = (tl.zeros((BLOCK_K // VECTOR,), tl.float32),)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        weights = load_weight_block(weight_ptrs, start, K, BLOCK_K)
        sums, squares = accumulate(
            *(sums, squares, weights, row_scale_ptr, x_ptr, 0, x_ptr, start),
            *(1, K, ROWS, BLOCK_K, VECTOR, GROUP_SIZE, False),
        )
    y = tl.sum(sums[0], 1)
    if GROUP_SIZE >= K:
        y *= tl.load(scale_ptr + weight_row)
    gate, up = tl.split(tl.trans(tl.reshape(y, (2, BLOCK_N))))
    y = gate / (1.0 + tl.exp(-gate)) * up
    out_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + pair.to(tl.int64) * outputs + out_n
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=out_n < outputs)


@triton.jit
def _expert_of_column(
    column: tl.tensor,
    expert_ptr: tl.tensor,
    first_expert: tl.tensor,
    local_experts: tl.tensor,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the local expert of each of a token's TOP_K × K columns, and whether there is one."""
    expert = tl.load(expert_ptr + tl.minimum(column // K, TOP_K - 1)) - first_expert
    return expert, (expert >= 0) & (expert < local_experts) & (column < TOP_K * K)


@triton.jit
def _load_expert_block(
    weight_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    start: tl.tensor,
    row: tl.tensor,
    outputs: tl.tensor,
    first_expert: tl.tensor,
    local_experts: tl.tensor,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Load weights `[rows, BLOCK_K]` of a token's experts from column `start` on; 0 for columns without an expert."""
    column = start + tl.arange(0, BLOCK_K)
    expert, inside = _expert_of_column(column, expert_ptr, first_expert, local_experts, TOP_K, K)
    # VECTOR columns belong to one expert, so a thread can load them at once.
    offset = tl.max_constancy(expert, [VECTOR]).to(tl.int64) * outputs * K + column % K
    offset = tl.max_contiguous(tl.multiple_of(offset, [VECTOR]), [VECTOR])
    inside = tl.max_constancy(inside, [VECTOR])
    weight_ptrs = weight_ptr + row.to(tl.int64)[:, None] * K + offset[None, :]
    return tl.load(weight_ptrs, mask=inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _weighted_products(
    weights: tl.tensor,
    h_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    share_ptr: tl.tensor,
    start: tl.tensor,
    row: tl.tensor,
    outputs: tl.tensor,
    first_expert: tl.tensor,
    local_experts: tl.tensor,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> tl.tensor:
    """Return sums of VECTOR products each, times the weights of the experts and the scales: `[rows, BLOCK_K / VECTOR]`.

    weights  `_load_expert_block` from column `start` on
    """
    column = start + tl.arange(0, BLOCK_K)
    _, inside = _expert_of_column(column, expert_ptr, first_expert, local_experts, TOP_K, K)
    # The h of absent experts is not written.
    h = tl.load(h_ptr + column, mask=tl.max_constancy(inside, [VECTOR]), other=0.0).to(tl.float32)
    products = tl.reshape(weights.to(tl.float32) * h[None, :], (BLOCK_N, BLOCK_K // VECTOR, VECTOR))
    column = start + tl.arange(0, BLOCK_K // VECTOR) * VECTOR
    factor = tl.load(share_ptr + tl.minimum(column // K, TOP_K - 1))[None, :]
    if GROUP_SIZE > 0:
        expert, inside = _expert_of_column(column, expert_ptr, first_expert, local_experts, TOP_K, K)
        scale_row = expert[None, :].to(tl.int64) * outputs + row[:, None]
        scale_ptrs = scale_ptr + scale_row * (K // GROUP_SIZE) + (column % K // GROUP_SIZE)[None, :]
        factor *= tl.load(scale_ptrs, mask=inside[None, :], other=0.0)
    return tl.sum(products, 2) * factor


@triton.jit
def _combining_kernel(
    h_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    share_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    outputs: tl.tensor,
    first_expert: tl.tensor,
    local_experts: tl.tensor,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of a token: the sum over its experts. Grid: `(⌈outputs / BLOCK_N⌉, tokens)`.

    The inputs of a token's TOP_K experts are one row of TOP_K × K columns. So no block is padded for each expert.

    h_ptr                        [tokens, TOP_K, K]
    weight_ptr                   [local_experts × outputs, K]
    scale_ptr                    float32 [weight rows, K / GROUP_SIZE]; GROUP_SIZE 0: no scales
    expert_ptr                   int32 [tokens, TOP_K]
    share_ptr                    float32 [tokens, TOP_K], weights of the experts
    out_ptr                      [tokens, outputs], with `out_stride` between tokens; ADD_RESIDUAL adds to its values
    first_expert, local_experts  first of the local experts, and their number; nothing of others is read
    VECTOR                       weights that a thread loads at once; divides K and GROUP_SIZE
    PDL                          this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()

    # Read the first block of weights while the predecessor still computes h. It started this kernel after its own
    # wait, so the experts are selected.
    token = tl.program_id(1)
    expert_ptr += token * TOP_K
    out_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(out_n, outputs - 1)  # see `_gated_kernel`
    weights = _load_expert_block(
        weight_ptr, expert_ptr, 0, n, outputs, first_expert, local_experts, TOP_K, K, BLOCK_K, VECTOR
    )
    if PDL:
        gdc_wait()

    # Multiply.
    h_ptr += token.to(tl.int64) * TOP_K * K
    share_ptr += token * TOP_K
    sums = _weighted_products(
        *(weights, h_ptr, scale_ptr, expert_ptr, share_ptr, 0, n, outputs, first_expert, local_experts),
        *(TOP_K, K, BLOCK_N, BLOCK_K, VECTOR, GROUP_SIZE),
    )
    for start in tl.range(BLOCK_K, TOP_K * K, BLOCK_K, num_stages=1):
        weights = _load_expert_block(
            *(weight_ptr, expert_ptr, start, n, outputs, first_expert, local_experts, TOP_K, K, BLOCK_K, VECTOR)
        )
        sums += _weighted_products(
            *(weights, h_ptr, scale_ptr, expert_ptr, share_ptr, start, n, outputs, first_expert, local_experts),
            *(TOP_K, K, BLOCK_N, BLOCK_K, VECTOR, GROUP_SIZE),
        )
    y = tl.sum(sums, 1)
    out_ptrs = out_ptr + token.to(tl.int64) * out_stride + out_n
    if ADD_RESIDUAL:
        y += tl.load(out_ptrs, mask=out_n < outputs, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=out_n < outputs)
