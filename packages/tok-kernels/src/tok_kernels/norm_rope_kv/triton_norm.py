"""Compute the RMS norm, with one program per row."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options


def rms_norm(x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Compute `Backend.rms_norm`. Raises ValueError for a weight of another length than the last axis of x."""
    x = _rows(x_TN, weight_N)
    normed = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if x.numel():
        _rms_norm_kernel[(x.shape[0],)](
            x, x.stride(0), weight_N.contiguous(), normed, eps, **_launch_options(x), **pdl_options(x.device)
        )
    return normed.view(x_TN.shape)


def _rows(x_TN: Tensor, weight_N: Tensor) -> Tensor:
    """Return x as a matrix of contiguous rows, without a copy if possible."""
    if x_TN.shape[-1:] != weight_N.shape:
        raise ValueError(f"weight has shape {tuple(weight_N.shape)}; allowed: {tuple(x_TN.shape[-1:])}, x's last axis")
    x = x_TN.reshape(-1, x_TN.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_options(x: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(x.shape[-1])
    return {"size": x.shape[-1], "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Normalise one row of `size` entries. Grid: `(rows,)`.

    The weight is loaded while the predecessor still runs, since no kernel of the step writes it.

    x       [rows, size], with `x_stride` between rows
    weight  [size]
    normed  [rows, size], contiguous, result
    PDL     this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    norm_weight = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value) / size + eps)
    scaled = value * scale * norm_weight
    tl.store(normed + row * size + column, scaled.to(normed.dtype.element_ty), mask=inside)
