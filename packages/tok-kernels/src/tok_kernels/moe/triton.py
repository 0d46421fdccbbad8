"""Compute a mixture of experts in Triton: sort pairs by expert, two grouped GEMMs, and the weighted sum."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from tok_kernels.launch_config import pdl_options, power_of_two
from tok_kernels.linear.quantized_weights import PackedWeight, QuantizedRows, ScaledWeight
from tok_kernels.linear.triton_packed import dequantize, unpacks
from tok_kernels.linear.triton_quantize import quantize_rows
from tok_kernels.linear.triton_scaled import MIN_CAPABILITY
from tok_kernels.moe.interface import ExpertWeights, Routing, Weight, rows_of
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

_COMBINE_BLOCK = 1024  # columns that a program of the weighted sum computes
_MAX_QUANTIZED_ROWS = 32  # rows of a tile; for larger tiles, weights are dequantised before the grouped GEMM
_DEQUANTIZED_ROWS = 1 << 14  # rows of a weight that are dequantised at once
_MIN_GROUP = 16  # columns that tensor cores multiply at once
_W8A8_GROUP = 128  # columns that share a block-wise scale; W8A8 takes no other group
_MIN_ROWS, _MAX_ROWS = 16, 128  # rows of a tile
# By rows of a tile: (lines, block, stages) of plain and of gated GEMMs with 4 warps.
_LAUNCHES = {
    16: ((64, 128, 3), (64, 128, 3)),
    32: ((64, 128, 3), (64, 64, 4)),
    64: ((128, 64, 3), (128, 64, 3)),
}
_W8A8_LINES, _W8A8_BLOCK, _W8A8_STAGES = 128, 128, 3


@dataclass(frozen=True, slots=True)
class GroupedLaunch:
    """Launch configuration of a grouped GEMM.

    rows    rows of a tile, or of a program where a tile has several
    lines   outputs of a program; of a gated GEMM, as many gates and up projections
    block   inputs that it reads at a time
    warps   Triton's num_warps
    stages  Triton's num_stages
    """

    rows: int
    lines: int
    block: int
    warps: int
    stages: int


def grouped_launch(tokens: int, routing: Routing, dtype: torch.dtype, *, gated: bool) -> GroupedLaunch:
    """Return the launch for `tokens` of `dtype`: tiles have room for twice the mean tokens of an expert.

    Measured on an H200 with the experts of Qwen3-30B-A3B at 1, 16, 64, 256 and 8,192 tokens; launches of 32-bit
    activations are not measured.
    """
    twice = -(-2 * tokens * routing.expert_TC.shape[1] // routing.experts)
    rows = max(_MIN_ROWS, min(_MAX_ROWS, power_of_two(twice)))
    if dtype.itemsize > 2:
        return GroupedLaunch(min(rows, 32), 32, 32, 4, 2)
    if rows < _MAX_ROWS:
        lines, block, stages = _LAUNCHES[rows][gated]
        return GroupedLaunch(rows, lines, block, 4, stages)
    return GroupedLaunch(rows, 128, 64, 8, 4 if gated else 3)


def w8a8_launch(rows: int, *, gated: bool) -> GroupedLaunch:
    """Return the W8A8 launch for tiles of `rows`.

    Measured on an H200 with the experts of Qwen3-30B-A3B at 128, 512, 2,048 and 8,192 tokens. The second GEMM of the
    largest step takes 0.32 ms by programs of 64 rows, and 0.43 ms by programs of 128.
    """
    large = gated and rows == _MAX_ROWS
    rows, warps = (rows, 8) if large else (min(rows, _MAX_ROWS // 2), 4)
    return GroupedLaunch(rows, _W8A8_LINES, _W8A8_BLOCK, warps, _W8A8_STAGES)


def fused_experts(
    x_TN: Tensor, routing: Routing, weights: ExpertWeights, *, residual_TN: Tensor | None = None
) -> Tensor:
    """Compute `Backend.fused_experts`. Raises ValueError for shapes that do not fit.

    With tiles of more than 16 rows and weights of 8 bits, activations are quantised to the dtype of the weights.
    """
    gate_up, down = (grouped_launch(len(x_TN), routing, x_TN.dtype, gated=gated) for gated in (True, False))
    if not (isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)):
        if gate_up.rows > _MIN_ROWS and all(_supports_w8a8(x_TN, weight) for weight in (weights.gate_up, weights.down)):
            gate_up, down = (w8a8_launch(gate_up.rows, gated=gated) for gated in (True, False))
            return fused_experts_with(gate_up, down, x_TN, routing, weights, residual_TN, w8a8=True)
        if gate_up.rows > _MAX_QUANTIZED_ROWS:
            # On an H200, Triton 3.6 gave wrong sums of weights that tiles of 128 rows converted.
            gate_up_weight, down_weight = (_dequantized(one, x_TN.dtype) for one in (weights.gate_up, weights.down))
            weights = ExpertWeights(gate_up_weight, down_weight, weights.held)
        else:
            gate_up, down = (replace(launch, rows=_MIN_ROWS) for launch in (gate_up, down))
    return fused_experts_with(gate_up, down, x_TN, routing, weights, residual_TN)


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
    """Compute `Backend.fused_experts` with the given launches; rows of the second divide those of the first.

    w8a8  quantise activations to the 8 bits of the weights
    """
    _check(x_TN, routing, weights, residual_TN)
    (tokens, size), chosen = x_TN.shape, routing.expert_TC.shape[1]
    out_TN = torch.empty_like(x_TN, memory_format=torch.contiguous_format) if residual_TN is None else residual_TN
    if not tokens:
        return out_TN
    x_TN = x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()
    held = weights.held_of(routing.experts)
    columns = rows_of(weights.gate_up) // len(held) // 2
    order = sort_pairs(routing, gate_up.rows, held)
    h_RF = torch.empty((tokens * chosen, columns), dtype=x_TN.dtype, device=x_TN.device)
    y_PN = torch.empty((tokens * chosen, size), dtype=x_TN.dtype, device=x_TN.device)
    grouped_gemm(gate_up, _activations(x_TN, weights.gate_up, w8a8), weights.gate_up, h_RF, order, chosen, gated=True)
    grouped_gemm(down, _activations(h_RF, weights.down, w8a8), weights.down, y_PN, order, chosen, gated=False)
    combine(y_PN, routing, held, out_TN, add=residual_TN is not None)
    return out_TN


def grouped_gemm(
    launch: GroupedLaunch,
    x: Tensor | QuantizedRows,
    weight: Weight,
    out: Tensor,
    order: SortedPairs,
    chosen: int,
    *,
    gated: bool,
) -> None:
    """Multiply sorted rows by their experts' matrices: tokens by gate and up projections, or their results by down.

    gated  x has tokens, and `out` gets `silu(gate) * up` in the order of sorted rows; else x has sorted rows, and
           `out` gets results in the order of pairs
    """
    w8a8 = isinstance(x, QuantizedRows)
    x, x_scale, x_scale_group = (
        (x.values_TK, x.scale_TG, x.scale_TG.stride(1)) if isinstance(x, QuantizedRows) else (x, x, 0)
    )
    outputs, inputs = out.shape[1], x.shape[1]
    if not w8a8 and not _is_supported(weight, x):
        weight = _dequantized(weight, x.dtype)
    if isinstance(weight, PackedWeight):
        _packed_grouped_gemm(launch, x, weight, out, order, chosen, gated=gated)
        return
    values, scale, group, block = weight, weight, 0, launch.block
    if isinstance(weight, ScaledWeight):
        values, scale, group = weight.values_NK, weight.scale_NG, weight.group or 0
        block = min(block, group & -group) if group else block  # the columns of a block share a scale
    programs = order.tiles * (order.tile_rows // launch.rows) * triton.cdiv(outputs, launch.lines)
    grouped_gemm_kernel[(programs,)](
        *(x, x.stride(0), x_scale, x_scale_group, values, scale),
        *(out, order.pair_R, order.tile_3S, order.tiles, outputs, inputs),
        C=chosen,
        TILE=order.tile_rows,
        ROWS=launch.rows,
        LINES=launch.lines,
        BLOCK=block,
        STAGES=launch.stages,
        EVEN=inputs % block == 0,
        GATED=gated,
        GROUP=group,
        SCALED=isinstance(weight, ScaledWeight),
        W8A8=w8a8,
        num_warps=launch.warps,
        **pdl_options(x.device),
    )


def _packed_grouped_gemm(
    launch: GroupedLaunch, x: Tensor, weight: PackedWeight, out: Tensor, order: SortedPairs, chosen: int, *, gated: bool
) -> None:
    (lines, columns), outputs = weight.shape, out.shape[1]
    group = weight.group or columns
    packed_grouped_gemm_kernel[(order.tiles * triton.cdiv(outputs, launch.lines),)](
        *(x, x.stride(0), weight.words, weight.words.stride(0), weight.scale_GF),
        *(weight.scale_GF if weight.zero_GF is None else weight.zero_GF, lines),
        *(out, order.pair_R, order.tile_3S, order.tiles, outputs),
        K=columns,
        C=chosen,
        ROWS=launch.rows,
        LINES=launch.lines,
        BLOCK=min(launch.block, group & -group) if group < columns else launch.block,
        STAGES=launch.stages,
        GROUP=group,
        BITS=weight.bits,
        GATED=gated,
        ZEROS=weight.zero_GF is not None,
        ASM=x.device.type != "cpu",
        num_warps=launch.warps,
        **pdl_options(x.device),
    )


def combine(y_PN: Tensor, routing: Routing, held: range, out_TN: Tensor, *, add: bool) -> None:
    """Write the weighted sum of each token's results by the experts `held`, or `add` it to `out`."""
    tokens, size = out_TN.shape
    combine_kernel[(tokens, triton.cdiv(size, _COMBINE_BLOCK))](
        *(y_PN, routing.weight_TC, routing.expert_TC, out_TN, out_TN.stride(0), size, held.start, len(held)),
        C=routing.expert_TC.shape[1],
        BLOCK=min(_COMBINE_BLOCK, power_of_two(size)),
        ADD=add,
        num_warps=4,
        **pdl_options(out_TN.device),
    )


def _dequantized(weight: Weight, dtype: torch.dtype) -> Weight:
    """Return the weight in `dtype`, converted in parts to bound the memory."""
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
    """Return whether W8A8 takes the weight: activations are quantised to its dtype."""
    if not isinstance(weight, ScaledWeight) or x.dtype.itemsize > 2 or not _has_dtype(weight, x.device):
        return False
    groups = (None, _W8A8_GROUP) if weight.values_NK.dtype.is_floating_point else (None,)
    return weight.group in groups


def _has_dtype(weight: ScaledWeight, device: torch.device) -> bool:
    """Return whether the device has instructions for the weight's dtype."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY[weight.values_NK.dtype]


def _is_supported(weight: Weight, x: Tensor) -> bool:
    """Return whether the grouped GEMM takes the weight; otherwise it is dequantised."""
    if isinstance(weight, Tensor):
        return True
    if isinstance(weight, PackedWeight):
        return unpacks(x, weight)
    return _has_dtype(weight, x.device) and (weight.group is None or weight.group % _MIN_GROUP == 0)


def _check(x_TN: Tensor, routing: Routing, weights: ExpertWeights, residual_TN: Tensor | None) -> None:
    held, size = weights.held_of(routing.experts), x_TN.shape[1]
    if not held or held.step != 1 or held.start < 0 or held.stop > routing.experts:
        raise ValueError(f"held is {held}; allowed: consecutive experts below {routing.experts}")
    experts = len(held)
    if rows_of(weights.gate_up) % (2 * experts) or rows_of(weights.down) != experts * size:
        found = f"{rows_of(weights.gate_up)} and {rows_of(weights.down)}"
        allowed = f"multiples of {2 * experts}, and {experts * size}"
        raise ValueError(f"gate_up and down have {found} rows; allowed for {experts} experts: {allowed}")
    if len(routing.expert_TC) != len(x_TN):
        raise ValueError(f"experts are chosen for {len(routing.expert_TC)} tokens; allowed: {len(x_TN)}, the rows of x")
    if residual_TN is not None and residual_TN.shape != x_TN.shape:
        raise ValueError(f"residual has shape {tuple(residual_TN.shape)}; allowed: {tuple(x_TN.shape)}")
