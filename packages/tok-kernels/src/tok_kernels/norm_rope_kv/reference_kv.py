"""Write and gather rows of the paged cache: one row per cached position, page × page_size + offset.

Rows of float8 are moved as bytes: torch's copies by index do not support float8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import LayerCache


def write_kv(k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
    """Store token `t`'s key and value at flat row `index_T[t]` (int64), converted to the cache's dtype.

    For float8_e4m3fn, values are clamped to ±448, then rounded to nearest, ties to even; NaN stays NaN. Of tokens with
    the same index, any may remain. The cache's pages must be evenly spaced in memory (RuntimeError otherwise).
    """
    _store(cache.k, index_T, k_TKD)
    _store(cache.v, index_T, v_TKD)


def _store(pages: Tensor, index_T: Tensor, x_TKD: Tensor) -> None:
    # view, not reshape: reshape may copy silently, and the write would be lost.
    rows = pages.view(-1, *pages.shape[2:])
    if pages.dtype != torch.float8_e4m3fn:
        rows.index_copy_(0, index_T, x_TKD.to(pages.dtype))
        return
    largest = torch.finfo(pages.dtype).max
    narrow = x_TKD.float().clamp(-largest, largest).to(pages.dtype)
    rows.view(torch.uint8).index_copy_(0, index_T, narrow.view(torch.uint8))


def gather_heads(pages: Tensor, row_NL: Tensor) -> Tensor:
    """Return the given rows of one layer's keys or values, heads before positions.

    `[N, L] -> [N, K, L, D]`, contiguous. The head is part of the index, so one gather yields the layout that the
    batched matmul needs.
    """
    heads, size = pages.shape[2:]
    row_NKL = row_NL.unsqueeze(1) * heads + torch.arange(heads, device=row_NL.device).unsqueeze(-1)
    rows = pages.view(-1, size)
    if pages.dtype == torch.float8_e4m3fn:
        rows = rows.view(torch.uint8)
    return rows.index_select(0, row_NKL.flatten()).view(pages.dtype).view(*row_NKL.shape, size)
