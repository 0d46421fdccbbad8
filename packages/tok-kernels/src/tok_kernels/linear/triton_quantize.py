"""Quantise activations to 8 bits, fused with the preceding norm or gated activation, and apply scales to GEMM results.

One program quantises a row, or several short ones, in chunks of BLOCK columns that it holds in registers.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options, power_of_two
from tok_kernels.linear.quantized_weights import MAX_VALUES, QuantizedRows, ScaledWeight
from tok_kernels.norm_rope_kv.triton_kv import ROUNDING_OFFSET

_MAX_BLOCK = 4096  # maximum columns of a chunk
_SHORT_BLOCK, _SHORT_ROWS = 1024, 4  # a program quantises so many rows of at most so many columns
_SCALE_BLOCK = 2048  # columns of a program of `apply_scales`
_ROW_MULTIPLE = 4  # cuBLAS supports block-wise scales only for multiples of so many rows


def quantize_rows(x_TK: Tensor, weight: ScaledWeight, norm: tuple[Tensor, float] | None = None) -> QuantizedRows:
    """Quantise x, or with a norm `rms_norm(x)`, for a GEMM with `weight`."""
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    norm_weight, eps = (x_TK, 0.0) if norm is None else (norm[0].contiguous(), norm[1])
    rows = _empty_rows(x_TK, x_TK.shape[1], weight)
    _launch_quantize(rows, weight, (x_TK, x_TK.stride(0), norm_weight, eps, *[x_TK] * 3), HAS_NORM=norm is not None)
    return rows


def gate_and_quantize(
    sums_TF: Tensor, x_scale_TG: Tensor | None, weight: ScaledWeight, bias_F: Tensor | None, down: ScaledWeight
) -> QuantizedRows:
    """Quantise `silu(gate) * up` for a GEMM with `down`.

    `[gate, up]` are the halves of `sums · x_scale · scale + bias`, with one `x_scale` per token and one `scale` per
    weight row. With `x_scale` None, they are the halves of `sums + bias`.
    """
    rows = _empty_rows(sums_TF, sums_TF.shape[1] // 2, down)
    scale = sums_TF if x_scale_TG is None else x_scale_TG
    bias = sums_TF if bias_F is None else bias_F.contiguous()
    args = (sums_TF, sums_TF.stride(0), sums_TF, 0.0, scale, weight.scale_NG, bias)
    _launch_quantize(rows, down, args, GATED=True, SCALED=x_scale_TG is not None, HAS_BIAS=bias_F is not None)
    return rows


def apply_scales(
    sums_TN: Tensor, x_scale_TG: Tensor, weight: ScaledWeight, bias_N: Tensor | None, out_TN: Tensor, *, add: bool
) -> Tensor:
    """Write `sums · x_scale · scale + bias` to `out`, or `add` it, and return `out`.

    There is one `x_scale` per token and one `scale` per weight row.
    """
    tokens, outputs = sums_TN.shape
    _apply_scales_kernel[(tokens, triton.cdiv(outputs, _SCALE_BLOCK))](
        *(sums_TN, sums_TN.stride(0), x_scale_TG, weight.scale_NG, sums_TN if bias_N is None else bias_N.contiguous()),
        *(out_TN, out_TN.stride(0), outputs),
        BLOCK=_SCALE_BLOCK,
        HAS_BIAS=bias_N is not None,
        ADD_RESIDUAL=add,
        num_warps=4,
        **pdl_options(sums_TN.device),
    )
    return out_TN


def _empty_rows(like: Tensor, columns: int, weight: ScaledWeight) -> QuantizedRows:
    """Return uninitialised rows as wide as `columns`, quantised for a GEMM with `weight`, on the device of `like`."""
    tokens, groups, padded_tokens = len(like), 1, len(like)
    if weight.group is not None:
        groups, padded_tokens = triton.cdiv(columns, weight.group), triton.cdiv(tokens, _ROW_MULTIPLE) * _ROW_MULTIPLE
    values = torch.empty((padded_tokens, columns), dtype=weight.values_NK.dtype, device=like.device)
    scale = torch.empty((groups, padded_tokens), dtype=torch.float32, device=like.device).t()
    return QuantizedRows(values, scale, tokens, like.dtype if like.dtype.is_floating_point else torch.bfloat16)


def _launch_quantize(
    rows: QuantizedRows, weight: ScaledWeight, args: tuple[Tensor | int | float, ...], **options: bool
) -> None:
    """Launch `_quantize_kernel` with its arguments up to `bias_ptr`; options that are not given are False."""
    columns = rows.values_TK.shape[1]
    block = min(_MAX_BLOCK, power_of_two(columns))
    block_rows = _SHORT_ROWS if block <= _SHORT_BLOCK else 1
    flags = {name: options.get(name, False) for name in ("HAS_NORM", "GATED", "SCALED", "HAS_BIAS")}
    _quantize_kernel[(triton.cdiv(rows.tokens, block_rows),)](
        *args,
        *(rows.values_TK, rows.scale_TG, rows.scale_TG.stride(1), rows.tokens, columns),
        MAX_VALUE=MAX_VALUES[rows.values_TK.dtype],
        GROUP_SIZE=weight.group or 0,
        CHUNKS=triton.cdiv(columns, block),
        BLOCK=block,
        ROWS=block_rows,
        num_warps=max(block_rows, block // (256 if columns > block else 1024)),
        **flags,
        **pdl_options(rows.values_TK.device),
    )


@triton.jit
def _rounded(x: tl.tensor, out_ptr: tl.tensor) -> tl.tensor:
    """Return x in the dtype that `out_ptr` points to, rounded to nearest, ties to even."""
    if out_ptr.dtype.element_ty == tl.int8:
        x = (x + ROUNDING_OFFSET) - ROUNDING_OFFSET
    return x.to(out_ptr.dtype.element_ty)


@triton.jit
def _scale_of(largest: tl.tensor, MAX_VALUE: tl.constexpr) -> tl.tensor:
    """Return the scale with which the `largest` magnitude becomes MAX_VALUE; 1 if it is 0."""
    return tl.where(largest > 0, largest / MAX_VALUE, 1.0)


@triton.jit(do_not_specialize=["values_scale_group_stride", "tokens"])
def _quantize_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    x_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    values_ptr: tl.tensor,
    values_scale_ptr: tl.tensor,
    values_scale_group_stride: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantise ROWS rows, so that the largest magnitude of each group of columns becomes MAX_VALUE.

    Grid: `(⌈tokens / ROWS⌉,)`.

    1. Load the CHUNKS chunks of each row, and apply scales, bias and gated activation.
    2. HAS_NORM: divide by the root mean square of the row, and multiply by the norm's weight.
    3. GROUP_SIZE 0: compute the scale of the row.
    4. Compute the scale of each group of GROUP_SIZE columns, if any, and store quotients and scales.

    x_ptr                   [tokens, columns], with `x_stride` between tokens; GATED: [tokens, 2 × columns], gate and
                            then up projection, of which silu(gate) * up is quantised
    norm_ptr                [columns], weight of the RMS norm
    x_scale_ptr, scale_ptr  SCALED: float32 [tokens] and [2 × columns], factors of x
    bias_ptr                HAS_BIAS: [2 × columns]
    values_ptr              8 bits [tokens, columns], result
    values_scale_ptr        float32 [groups, tokens], result, with `values_scale_group_stride` between groups
    PDL                     this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    groups: tl.constexpr = BLOCK // GROUP_SIZE if GROUP_SIZE > 0 else 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < tokens

    # Load the rows.
    x_ptrs = x_ptr + row * x_stride
    if SCALED:
        x_scale = tl.load(x_scale_ptr + row, mask=is_row, other=0.0)
    values = ()
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = column < columns
        value = tl.load(x_ptrs + column, mask=is_row & inside, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(x_ptrs + columns + column, mask=is_row & inside, other=0.0).to(tl.float32)
            if SCALED:
                value *= x_scale * tl.load(scale_ptr + column, mask=inside, other=0.0)
                up *= x_scale * tl.load(scale_ptr + columns + column, mask=inside, other=0.0)
            if HAS_BIAS:
                value += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
                up += tl.load(bias_ptr + columns + column, mask=inside, other=0.0).to(tl.float32)
            value = value / (1.0 + tl.exp(-value)) * up
        if HAS_NORM:
            squares += value * value
        values += (value,)

    # Apply the norm.
    if HAS_NORM:
        factor = 1.0 / tl.sqrt_rn(tl.sum(squares, 1, keep_dims=True) / columns + eps)
        normed = ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
            norm_weight = tl.load(norm_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            normed += (values[chunk] * factor * norm_weight,)
        values = normed

    # Compute the scale of each row.
    if GROUP_SIZE == 0:
        magnitude = tl.zeros((ROWS, BLOCK), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            magnitude = tl.maximum(magnitude, tl.abs(values[chunk]))
        scale = _scale_of(tl.max(magnitude, 1, keep_dims=True), MAX_VALUE)
        tl.store(values_scale_ptr + row, scale, mask=is_row)
        factor = 1.0 / scale

    # Quantise.
    for chunk in tl.static_range(CHUNKS):
        column = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
        value = values[chunk]
        if GROUP_SIZE == 0:
            value *= factor
        else:
            value = tl.reshape(value, (ROWS, groups, GROUP_SIZE))
            scale = _scale_of(tl.max(tl.abs(value), 2), MAX_VALUE)
            group = chunk * groups + tl.arange(0, groups)[None, :]
            scale_ptrs = values_scale_ptr + group * values_scale_group_stride + row
            tl.store(scale_ptrs, scale, mask=is_row & (group * GROUP_SIZE < columns))
            value = tl.reshape(value / scale[:, :, None], (ROWS, BLOCK))
        value = tl.clamp(value, -MAX_VALUE, MAX_VALUE)
        tl.store(values_ptr + row * columns + column, _rounded(value, values_ptr), mask=is_row & (column < columns))


@triton.jit
def _apply_scales_kernel(
    sums_ptr: tl.tensor,
    sums_stride: tl.tensor,
    x_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply BLOCK columns of a row by their scales, and add bias and residual. Grid: `(tokens, ⌈columns / BLOCK⌉)`.

    sums_ptr                [tokens, columns], with `sums_stride` between tokens
    x_scale_ptr, scale_ptr  float32 [tokens] and [columns]
    bias_ptr                HAS_BIAS: [columns]
    out_ptr                 [tokens, columns], with `out_stride` between tokens; ADD_RESIDUAL adds to its values
    PDL                     this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    # Weight scales are read before the predecessor ends, since no kernel of the step writes them.
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    y = tl.load(sums_ptr + row * sums_stride + column, mask=inside, other=0.0).to(tl.float32)
    y *= tl.load(x_scale_ptr + row) * scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADD_RESIDUAL:
        y += tl.load(out_ptr + row * out_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=inside)
