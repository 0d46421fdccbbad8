"""Compute the gated activation `silu(gate) * up` (SwiGLU) in one pass over its input."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 4  # output columns and warps of a program


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """Compute `Backend.silu_and_mul`, with any leading axes. Raises ValueError for an odd last axis."""
    width = gate_up_TF.shape[-1]
    if width % 2:
        raise ValueError(f"gate_up has a last axis of {width}; allowed: even numbers, gate and up in equal parts")
    rows = gate_up_TF.reshape(-1, width)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty((*gate_up_TF.shape[:-1], width // 2), dtype=rows.dtype, device=rows.device)
    if out.numel():
        blocks = triton.cdiv(width // 2, _BLOCK)
        _silu_and_mul_kernel[(rows.shape[0] * blocks,)](
            rows, rows.stride(0), out, width // 2, blocks, _BLOCK, num_warps=_WARPS
        )
    return out


@triton.jit
def _silu_and_mul_kernel(
    gate_up: tl.tensor, stride: tl.tensor, out: tl.tensor, size: tl.tensor, blocks: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Compute BLOCK of the `size` output columns of one row. Grid: `(rows × blocks,)`, with blocks changing fastest.

    gate_up  [rows, 2 × size], with `stride` between rows
    out      [rows, size], contiguous, result
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    if out.dtype.element_ty == tl.float32:
        product = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    else:  # faster division; its error is smaller than the rounding to 16 bits
        product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=inside)
