"""Compute batch-invariant linear layers on a CPU: a row's bits do not depend on other rows, nor on their number.

A CPU's BLAS chooses a kernel by the number of rows, and kernels accumulate in different orders. Here every GEMM has
`TILE_ROWS` rows; the last tile is padded with zeros.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tok_kernels.linear.reference import matmul
from tok_kernels.norm_rope_kv.reference import rms_norm

TILE_ROWS = 16


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Compute `Backend.linear`, tile by tile."""
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, weight_NK.dtype)
    out_TN = residual_TN
    if out_TN is None:
        out_TN = x_TK.new_empty((len(x_TK), len(weight_NK)), dtype=weight_NK.dtype)
    size = _tile_rows(*weight_NK.shape, weight_NK.dtype, torch.get_num_threads())
    for start in range(0, len(x_TK), size):
        rows = slice(start, start + size)
        added = None if residual_TN is None else _tile(residual_TN[rows], size)
        out_TN[rows] = matmul(_tile(x_TK[rows], size), weight_NK, bias_N, added)[: len(x_TK) - start]
    return out_TN


def gated_linear(
    x_TK: Tensor, gate_up_FK: Tensor, bias_F: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """Compute `Backend.gated_linear`."""
    return silu_and_mul(linear(x_TK, gate_up_FK, bias_F, norm=norm))


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """Compute `Backend.silu_and_mul` by exp, since torch's silu rounds the last elements of a tensor differently."""
    gate, up = (half.float() for half in gate_up_TF.chunk(2, dim=-1))
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up_TF.dtype)


def _tile(rows_XN: Tensor, size: int) -> Tensor:
    """Copy the rows to new memory, which always has the same alignment, and pad them with zeros."""
    tile = rows_XN.new_zeros((size, rows_XN.shape[1]))
    tile[: len(rows_XN)] = rows_XN
    return tile


@lru_cache(maxsize=1024)
def _tile_rows(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> int:
    """Return TILE_ROWS if a test shows that a row's bits do not depend on its index in a tile on this CPU; else 1."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn((outputs, inputs), generator=generator).to(dtype)
    x_TK = torch.randn((TILE_ROWS, inputs), generator=generator).to(dtype)
    out_TN = matmul(x_TK, weight_NK, None, None)
    is_invariant = all(
        torch.equal(matmul(x_TK.roll(shift, 0), weight_NK, None, None), out_TN.roll(shift, 0))
        for shift in range(1, TILE_ROWS)
    )
    return TILE_ROWS if is_invariant else 1
