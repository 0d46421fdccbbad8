"""Quantise activations to 8 bits, fused with the norm or gated activation before, and apply scales to results.

One program computes a row, in chunks of BLOCK columns that it holds in registers.
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
_FINISH_BLOCK = 2048  # columns that a program of `finish_rows` computes
_ROW_MULTIPLE = 4  # cuBLAS takes block-wise scales only for multiples of so many rows


def quantize_rows(x_TK: Tensor, weight: ScaledWeight, norm: tuple[Tensor, float] | None = None) -> QuantizedRows:
    """Quantise x, or `rms_norm(x)` with a norm, for a GEMM with `weight`."""
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    gain, eps = (x_TK, 0.0) if norm is None else (norm[0].contiguous(), norm[1])
    rows = _empty_rows(x_TK, x_TK.shape[1], weight)
    _launch(rows, weight, (x_TK, x_TK.stride(0), gain, eps, *[x_TK] * 3), NORM=norm is not None)
    return rows


def gate_and_quantize(
    sums_TF: Tensor, x_scale_TG: Tensor | None, weight: ScaledWeight, bias_F: Tensor | None, down: ScaledWeight
) -> QuantizedRows:
    """Quantise `silu(gate) * up` for a GEMM with `down`.

    `[gate, up]` are the halves of `sums · x_scale · scale + bias`, where `x_scale` and the weight's scales belong to
    rows; x_scale None: of `sums + bias`.
    """
    rows = _empty_rows(sums_TF, sums_TF.shape[1] // 2, down)
    scale = sums_TF if x_scale_TG is None else x_scale_TG
    bias = sums_TF if bias_F is None else bias_F.contiguous()
    args = (sums_TF, sums_TF.stride(0), sums_TF, 0.0, scale, weight.scale_NG, bias)
    _launch(rows, down, args, GATED=True, SCALED=x_scale_TG is not None, BIAS=bias_F is not None)
    return rows


def finish_rows(
    sums_TN: Tensor, x_scale_TG: Tensor, weight: ScaledWeight, bias_N: Tensor | None, out_TN: Tensor, *, add: bool
) -> Tensor:
    """Write `sums · x_scale · scale + bias` to `out`, or add it, and return `out`; scales belong to rows."""
    tokens, outputs = sums_TN.shape
    _finish_kernel[(tokens, triton.cdiv(outputs, _FINISH_BLOCK))](
        *(sums_TN, sums_TN.stride(0), x_scale_TG, weight.scale_NG, sums_TN if bias_N is None else bias_N.contiguous()),
        *(out_TN, out_TN.stride(0), outputs),
        BLOCK=_FINISH_BLOCK,
        BIAS=bias_N is not None,
        ADD=add,
        num_warps=4,
        **pdl_options(sums_TN.device),
    )
    return out_TN


def _empty_rows(like: Tensor, columns: int, weight: ScaledWeight) -> QuantizedRows:
    tokens, groups, held = len(like), 1, len(like)
    if weight.group is not None:
        groups, held = triton.cdiv(columns, weight.group), triton.cdiv(tokens, _ROW_MULTIPLE) * _ROW_MULTIPLE
    values = torch.empty((held, columns), dtype=weight.values_NK.dtype, device=like.device)
    scale = torch.empty((groups, held), dtype=torch.float32, device=like.device).t()
    return QuantizedRows(values, scale, tokens, like.dtype if like.dtype.is_floating_point else torch.bfloat16)


def _launch(rows: QuantizedRows, weight: ScaledWeight, args: tuple[Tensor | int | float, ...], **options: bool) -> None:
    columns = rows.values_TK.shape[1]
    block = min(_MAX_BLOCK, power_of_two(columns))
    flags = {name: options.get(name, False) for name in ("NORM", "GATED", "SCALED", "BIAS")}
    _quantize_kernel[(rows.tokens,)](
        *args,
        *(rows.values_TK, rows.scale_TG, rows.scale_TG.stride(1), columns),
        LIMIT=MAX_VALUES[rows.values_TK.dtype],
        GROUP=weight.group or 0,
        CHUNKS=triton.cdiv(columns, block),
        BLOCK=block,
        num_warps=max(1, block // (256 if columns > block else 1024)),
        **flags,
        **pdl_options(rows.values_TK.device),
    )


@triton.jit
def _rounded(x: tl.tensor, out_ptr: tl.tensor) -> tl.tensor:
    """Return x in the dtype that `out_ptr` points to, rounded to nearest, ties to even."""
    if out_ptr.dtype.element_ty == tl.int8:
        x = (x + ROUNDING_OFFSET) - ROUNDING_OFFSET
    return x.to(out_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["values_scale_group"])
def _quantize_kernel(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    gain_ptr: tl.tensor,
    eps: tl.tensor,
    x_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    values_ptr: tl.tensor,
    values_scale_ptr: tl.tensor,
    values_scale_group: tl.tensor,
    size: tl.tensor,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantise one row of `size` columns; the largest magnitude of each GROUP of columns (0: of all) becomes LIMIT.

    NORM    x is divided by its root mean square and multiplied by `gain`
    GATED   a row of x is a gate, then its up projection; both are multiplied by their scales (SCALED), get their bias
            (BIAS), and silu(gate) * up is rounded
    PDL     this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    groups: tl.constexpr = BLOCK // GROUP if GROUP > 0 else 1
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    if SCALED:
        x_scale = tl.load(x_scale_ptr + row)
    values = ()
    squares = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = column < size
        value = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(x_ptr + size + column, mask=inside, other=0.0).to(tl.float32)
            if SCALED:
                value *= x_scale * tl.load(scale_ptr + column, mask=inside, other=0.0)
                up *= x_scale * tl.load(scale_ptr + size + column, mask=inside, other=0.0)
            if BIAS:
                value += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
                up += tl.load(bias_ptr + size + column, mask=inside, other=0.0).to(tl.float32)
            value = value / (1.0 + tl.exp(-value)) * up
        if NORM:
            squares += value * value
        values += (value,)
    if NORM:
        factor = 1.0 / tl.sqrt_rn(tl.sum(squares) / size + eps)
        normed = ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * BLOCK + tl.arange(0, BLOCK)
            gain = tl.load(gain_ptr + column, mask=column < size, other=0.0).to(tl.float32)
            normed += (values[chunk] * factor * gain,)
        values = normed
    if GROUP == 0:
        top = tl.zeros((BLOCK,), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            top = tl.maximum(top, tl.abs(values[chunk]))
        largest = tl.max(top)
        scale = tl.where(largest > 0, largest / LIMIT, 1.0)
        tl.store(values_scale_ptr + row, scale)
        factor = 1.0 / scale
    for chunk in tl.static_range(CHUNKS):
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        value = values[chunk]
        if GROUP == 0:
            value *= factor
        else:
            value = tl.reshape(value, (groups, GROUP))
            largest = tl.max(tl.abs(value), 1)
            scale = tl.where(largest > 0, largest / LIMIT, 1.0)
            group = chunk * groups + tl.arange(0, groups)
            tl.store(values_scale_ptr + group * values_scale_group + row, scale, mask=group * GROUP < size)
            value = tl.reshape(value / scale[:, None], (BLOCK,))
        value = tl.clamp(value, -LIMIT, LIMIT)
        tl.store(values_ptr + row * size + column, _rounded(value, values_ptr), mask=column < size)


@triton.jit
def _finish_kernel(
    sums_ptr: tl.tensor,
    sums_row: tl.tensor,
    x_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_row: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply BLOCK columns of a row by their scales, add the bias (BIAS) and the values at `out` (ADD)."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    y = tl.load(sums_ptr + row * sums_row + column, mask=inside, other=0.0).to(tl.float32)
    y *= tl.load(x_scale_ptr + row) * scale
    if BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(out_ptr + row * out_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row + column, y.to(out_ptr.dtype.element_ty), mask=inside)
