"""Compute a mixture of experts in Triton: sort token-expert pairs, two grouped GEMMs, and the weighted sum.

A few tokens are computed by the GEMVs of `triton_gemv` instead.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from tok_kernels.launch_config import pdl_options, power_of_two
from tok_kernels.linear.quantized_weights import PackedWeight, QuantizedRows, ScaledWeight
from tok_kernels.linear.triton_config import VECTOR
from tok_kernels.linear.triton_packed import dequantize, unpacks
from tok_kernels.linear.triton_quantize import quantize_rows
from tok_kernels.linear.triton_scaled import MIN_CAPABILITY
from tok_kernels.moe.interface import ExpertWeights, Routing, Weight, rows_of
from tok_kernels.moe.triton_gemv import combining_expert_gemv, expert_gemv_launch, gated_expert_gemv
from tok_kernels.moe.triton_grouped import combine_kernel, grouped_gemm_kernel
from tok_kernels.moe.triton_packed import packed_grouped_gemm_kernel
from tok_kernels.moe.triton_route import SortedPairs, select_experts, sort_pairs

__all__ = [
    "GroupedLaunch",
    "combine",
    "fused_experts",
    "fused_experts_with",
    "grouped_gemm",
    "grouped_launch",
    "select_experts",
]

_MAX_GEMV_TOKENS = 4  # of the GEMV kernels, which read an expert's weights once for each of its tokens
_COMBINE_BLOCK = 1024  # columns that a program of the weighted sum computes
_MAX_QUANTIZED_BLOCK_M = 32  # for larger tiles, weights are dequantised before the grouped GEMM
_DEQUANTIZED_ROWS = 1 << 14  # weight rows that are dequantised at once
_MIN_GROUP = 16  # columns; tensor cores multiply so many at once
_W8A8_GROUP = 128  # columns that share a block-wise scale; W8A8 supports no other group
_MIN_BLOCK_M, _MAX_BLOCK_M = 16, 128
# By block_m: (block_n, block_k, stages) of plain and of gated GEMMs with 4 warps.
_LAUNCHES = {
    16: ((64, 128, 3), (64, 128, 3)),
    32: ((64, 128, 3), (64, 64, 4)),
    64: ((128, 64, 3), (128, 64, 3)),
}
_W8A8_BLOCK_N, _W8A8_BLOCK_K, _W8A8_STAGES = 128, 128, 3


@dataclass(frozen=True, slots=True)
class GroupedLaunch:
    """Launch configuration of a grouped GEMM.

    block_m  rows (token-expert pairs) of a program; tiles of `SortedPairs` have a multiple of it
    block_n  output features of a program; a gated GEMM computes as many gates and up projections
    block_k  input features that a program reads at a time
    warps    Triton's num_warps
    stages   Triton's num_stages
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def grouped_launch(tokens: int, routing: Routing, dtype: torch.dtype, *, gated: bool) -> GroupedLaunch:
    """Return the launch for `tokens` of `dtype`: a tile has room for twice the mean number of tokens of an expert.

    Measured on an H200 with the experts of Qwen3-30B-A3B at 1, 16, 64, 256 and 8,192 tokens; launches for float32
    are not measured.
    """
    twice_mean = -(-2 * tokens * routing.expert_TC.shape[1] // routing.experts)
    block_m = max(_MIN_BLOCK_M, min(_MAX_BLOCK_M, power_of_two(twice_mean)))
    if dtype.itemsize > 2:
        return GroupedLaunch(min(block_m, 32), 32, 32, 4, 2)
    if block_m < _MAX_BLOCK_M:
        block_n, block_k, stages = _LAUNCHES[block_m][gated]
        return GroupedLaunch(block_m, block_n, block_k, 4, stages)
    return GroupedLaunch(block_m, 128, 64, 8, 4 if gated else 3)


def w8a8_launch(tile_rows: int, *, gated: bool) -> GroupedLaunch:
    """Return the W8A8 launch for tiles of `tile_rows`.

    Measured on an H200 with the experts of Qwen3-30B-A3B at 4 to 8,192 tokens. The second GEMM of the largest step
    takes 0.32 ms with a block_m of 64, and 0.43 ms with 128.
    """
    if tile_rows == _MIN_BLOCK_M:
        return GroupedLaunch(tile_rows, 64, _W8A8_BLOCK_K, 4, 4)
    large = gated and tile_rows == _MAX_BLOCK_M
    block_m, warps = (tile_rows, 8) if large else (min(tile_rows, _MAX_BLOCK_M // 2), 4)
    return GroupedLaunch(block_m, _W8A8_BLOCK_N, _W8A8_BLOCK_K, warps, _W8A8_STAGES)


def fused_experts(
    x_TN: Tensor, routing: Routing, weights: ExpertWeights, *, residual_TN: Tensor | None = None
) -> Tensor:
    """Compute `Backend.fused_experts`. Raises ValueError for shapes that do not fit.

    GEMVs compute few tokens, and grouped GEMMs more. The GEMMs quantise activations to the dtype of 8-bit weights
    (W8A8), if they support the weights' scales.
    """
    if use_expert_gemv(x_TN, weights):
        return expert_gemv(x_TN, routing, weights, residual_TN)
    gate_up, down = (grouped_launch(len(x_TN), routing, x_TN.dtype, gated=gated) for gated in (True, False))
    if not (isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)):
        if all(_supports_w8a8(x_TN, weight) for weight in (weights.gate_up, weights.down)):
            gate_up, down = (w8a8_launch(gate_up.block_m, gated=gated) for gated in (True, False))
            return fused_experts_with(gate_up, down, x_TN, routing, weights, residual_TN, w8a8=True)
        if gate_up.block_m > _MAX_QUANTIZED_BLOCK_M:
            # With tiles of 128 rows, Triton 3.6 computed wrong sums of weights that it converts (on an H200).
            gate_up_weight, down_weight = (_dequantized(one, x_TN.dtype) for one in (weights.gate_up, weights.down))
            weights = ExpertWeights(gate_up_weight, down_weight, weights.local_experts)
        else:
            gate_up, down = (replace(launch, block_m=_MIN_BLOCK_M) for launch in (gate_up, down))
    return fused_experts_with(gate_up, down, x_TN, routing, weights, residual_TN)


def use_expert_gemv(x_TN: Tensor, weights: ExpertWeights) -> bool:
    """Return whether the GEMV kernels compute the experts of these tokens."""
    if not 0 < len(x_TN) <= _MAX_GEMV_TOKENS or x_TN.dtype not in (torch.float16, torch.bfloat16):
        return False
    return all(_gemv_supports(weight, x_TN) for weight in (weights.gate_up, weights.down))


def expert_gemv(x_TN: Tensor, routing: Routing, weights: ExpertWeights, residual_TN: Tensor | None) -> Tensor:
    """Compute `Backend.fused_experts` by the GEMV kernels."""
    _check(x_TN, routing, weights, residual_TN)
    out_TN = torch.empty_like(x_TN, memory_format=torch.contiguous_format) if residual_TN is None else residual_TN
    x_TN = x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()
    local = weights.local_range(routing.experts)
    inner = rows_of(weights.gate_up) // len(local) // 2
    h_PF = torch.empty((routing.expert_TC.numel(), inner), dtype=x_TN.dtype, device=x_TN.device)
    assert not isinstance(weights.gate_up, PackedWeight)
    assert not isinstance(weights.down, PackedWeight)
    gate_up = expert_gemv_launch(len(x_TN), _item_bytes(weights.gate_up), x_TN.shape[1], gated=True)
    down = expert_gemv_launch(len(x_TN), _item_bytes(weights.down), routing.expert_TC.shape[1] * inner, gated=False)
    gated_expert_gemv(gate_up, x_TN, routing, weights.gate_up, local, h_PF)
    combining_expert_gemv(down, h_PF, routing, weights.down, local, out_TN, add=residual_TN is not None)
    return out_TN


def _item_bytes(weight: Tensor | ScaledWeight) -> int:
    return weight.dtype.itemsize if isinstance(weight, Tensor) else weight.values_NK.dtype.itemsize


def _gemv_supports(weight: Weight, x_TN: Tensor) -> bool:
    """Return whether the GEMV kernels support a weight of columns that threads load at once."""
    if isinstance(weight, Tensor):
        return weight.dtype == x_TN.dtype and weight.is_contiguous() and weight.shape[1] % VECTOR == 0
    if isinstance(weight, PackedWeight) or not _has_dtype(weight, x_TN.device):
        return False
    columns = weight.values_NK.shape[1]
    group = weight.group or columns
    return columns % group == 0 and group % (2 * VECTOR) == 0


def fused_experts_with(
    gate_up: GroupedLaunch,
    down: GroupedLaunch,
    x_TN: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    residual_TN: Tensor | None,
    *,
    w8a8: bool = False,
) -> Tensor:
    """Compute `Backend.fused_experts` with the given launches; block_m of `down` divides that of `gate_up`.

    w8a8  quantise activations to the weights' dtype
    """
    _check(x_TN, routing, weights, residual_TN)
    (tokens, size), top_k = x_TN.shape, routing.expert_TC.shape[1]
    out_TN = torch.empty_like(x_TN, memory_format=torch.contiguous_format) if residual_TN is None else residual_TN
    if not tokens:
        return out_TN
    x_TN = x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()
    local = weights.local_range(routing.experts)
    inner = rows_of(weights.gate_up) // len(local) // 2
    order = sort_pairs(routing, gate_up.block_m, local)
    h_RF = torch.empty((tokens * top_k, inner), dtype=x_TN.dtype, device=x_TN.device)
    y_PN = torch.empty((tokens * top_k, size), dtype=x_TN.dtype, device=x_TN.device)
    grouped_gemm(gate_up, _activations(x_TN, weights.gate_up, w8a8), weights.gate_up, h_RF, order, top_k, gated=True)
    grouped_gemm(down, _activations(h_RF, weights.down, w8a8), weights.down, y_PN, order, top_k, gated=False)
    combine(y_PN, routing, local, out_TN, add=residual_TN is not None)
    return out_TN


def grouped_gemm(
    launch: GroupedLaunch,
    x: Tensor | QuantizedRows,
    weight: Weight,
    out: Tensor,
    order: SortedPairs,
    top_k: int,
    *,
    gated: bool,
) -> None:
    """Multiply sorted rows by their experts' weights.

    gated  True: x has one row per token, the weight is gate_up, and `out` gets `silu(gate) * up` in sorted order.
           False: x has the sorted rows, the weight is down, and `out` gets one row per pair in the order of pairs.
    """
    w8a8 = isinstance(x, QuantizedRows)
    x, x_scale, x_scale_group = (
        (x.values_TK, x.scale_TG, x.scale_TG.stride(1)) if isinstance(x, QuantizedRows) else (x, x, 0)
    )
    outputs, inputs = out.shape[1], x.shape[1]
    if not w8a8 and not _is_supported(weight, x):
        weight = _dequantized(weight, x.dtype)
    if isinstance(weight, PackedWeight):
        _packed_grouped_gemm(launch, x, weight, out, order, top_k, gated=gated)
        return
    values, scale, group, block_k = weight, weight, 0, launch.block_k
    if isinstance(weight, ScaledWeight):
        values, scale, group = weight.values_NK, weight.scale_NG, weight.group or 0
        block_k = min(block_k, group & -group) if group else block_k  # the columns of a block share a scale
        if not w8a8:
            group = group or inputs
    programs = order.tiles * (order.tile_rows // launch.block_m) * triton.cdiv(outputs, launch.block_n)
    grouped_gemm_kernel[(programs,)](
        *(x, x.stride(0), x_scale, x_scale_group, values, scale),
        *(out, order.pair_R, order.tile_3S, order.tiles, outputs, inputs),
        TOP_K=top_k,
        TILE_ROWS=order.tile_rows,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=block_k,
        NUM_STAGES=launch.stages,
        EVEN_K=inputs % block_k == 0,
        GATED=gated,
        GROUP_SIZE=group,
        W8A8=w8a8,
        num_warps=launch.warps,
        **pdl_options(x.device),
    )


def _packed_grouped_gemm(
    launch: GroupedLaunch, x: Tensor, weight: PackedWeight, out: Tensor, order: SortedPairs, top_k: int, *, gated: bool
) -> None:
    (weight_rows, columns), outputs = weight.shape, out.shape[1]
    group = weight.group or columns
    packed_grouped_gemm_kernel[(order.tiles * triton.cdiv(outputs, launch.block_n),)](
        *(x, x.stride(0), weight.words, weight.words.stride(0), weight.scale_GF),
        *(weight.scale_GF if weight.zero_GF is None else weight.zero_GF, weight_rows),
        *(out, order.pair_R, order.tile_3S, order.tiles, outputs),
        K=columns,
        TOP_K=top_k,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=min(launch.block_k, group & -group) if group < columns else launch.block_k,
        NUM_STAGES=launch.stages,
        GROUP_SIZE=group,
        BITS=weight.bits,
        GATED=gated,
        HAS_ZEROS=weight.zero_GF is not None,
        ASM=x.device.type != "cpu",
        num_warps=launch.warps,
        **pdl_options(x.device),
    )


def combine(y_PN: Tensor, routing: Routing, local: range, out_TN: Tensor, *, add: bool) -> None:
    """Write the weighted sum of each token's results of the `local` experts to `out`, or `add` it to `out`."""
    tokens, size = out_TN.shape
    combine_kernel[(tokens, triton.cdiv(size, _COMBINE_BLOCK))](
        *(y_PN, routing.weight_TC, routing.expert_TC, out_TN, out_TN.stride(0), size, local.start, len(local)),
        TOP_K=routing.expert_TC.shape[1],
        BLOCK_N=min(_COMBINE_BLOCK, power_of_two(size)),
        ADD_RESIDUAL=add,
        num_warps=4,
        **pdl_options(out_TN.device),
    )


def _dequantized(weight: Weight, dtype: torch.dtype) -> Weight:
    """Return the dense weight in `dtype`, converted in chunks of rows to bound the memory."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, PackedWeight):
        return dequantize(weight).to(dtype)
    dense = torch.empty(weight.values_NK.shape, dtype=dtype, device=weight.values_NK.device)
    for start in range(0, len(dense), _DEQUANTIZED_ROWS):
        rows = slice(start, start + _DEQUANTIZED_ROWS)
        dense[rows] = weight.rows(rows).dense(dtype)
    return dense


def _activations(x: Tensor, weight: Weight, w8a8: bool) -> Tensor | QuantizedRows:
    return quantize_rows(x, weight) if w8a8 and isinstance(weight, ScaledWeight) else x


def _supports_w8a8(x: Tensor, weight: Weight) -> bool:
    """Return whether the W8A8 GEMM supports the weight: activations are quantised to its dtype."""
    if not isinstance(weight, ScaledWeight) or x.dtype.itemsize > 2 or not _has_dtype(weight, x.device):
        return False
    groups = (None, _W8A8_GROUP) if weight.values_NK.dtype.is_floating_point else (None,)
    return weight.group in groups


def _has_dtype(weight: ScaledWeight, device: torch.device) -> bool:
    """Return whether the device has instructions for the weight's dtype."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY[weight.values_NK.dtype]


def _is_supported(weight: Weight, x: Tensor) -> bool:
    """Return whether the grouped GEMM supports the weight; otherwise it is dequantised."""
    if isinstance(weight, Tensor):
        return True
    if isinstance(weight, PackedWeight):
        return unpacks(x, weight)
    return _has_dtype(weight, x.device) and (weight.group is None or weight.group % _MIN_GROUP == 0)


def _check(x_TN: Tensor, routing: Routing, weights: ExpertWeights, residual_TN: Tensor | None) -> None:
    local, size = weights.local_range(routing.experts), x_TN.shape[1]
    if not local or local.step != 1 or local.start < 0 or local.stop > routing.experts:
        raise ValueError(f"local_experts is {local}; allowed: consecutive experts below {routing.experts}")
    experts = len(local)
    if rows_of(weights.gate_up) % (2 * experts) or rows_of(weights.down) != experts * size:
        given = f"{rows_of(weights.gate_up)} and {rows_of(weights.down)}"
        allowed = f"multiples of {2 * experts}, and {experts * size}"
        raise ValueError(f"gate_up and down have {given} rows; allowed for {experts} experts: {allowed}")
    if len(routing.expert_TC) != len(x_TN):
        raise ValueError(f"routing has {len(routing.expert_TC)} tokens; allowed: {len(x_TN)}, the rows of x")
    if residual_TN is not None and residual_TN.shape != x_TN.shape:
        raise ValueError(f"residual has shape {tuple(residual_TN.shape)}; allowed: {tuple(x_TN.shape)}")
