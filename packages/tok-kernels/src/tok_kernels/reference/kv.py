"""The paged cache seen as rows: one row a cached position, page × page_size + offset."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import LayerCache


def write_kv(k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
    """Stores token `t`'s key and value at flat row `index_T[t]` (int64), converted to the cache's dtype.

    The indices must differ from each other. The cache's pages must lie evenly in memory (RuntimeError
    otherwise).
    """
    _rows(cache.k).index_copy_(0, index_T, k_TKD.to(cache.k.dtype))
    _rows(cache.v).index_copy_(0, index_T, v_TKD.to(cache.v.dtype))


def gather_heads(pages: Tensor, row_NL: Tensor) -> Tensor:
    """The named rows of one layer's keys or values, heads before positions: `[N, L] -> [N, K, L, D]`,
    contiguous.

    The head is folded into the index, so that one gather yields the layout that the batched product wants.
    """
    heads, size = pages.shape[2:]
    row_NKL = row_NL.unsqueeze(1) * heads + torch.arange(heads, device=row_NL.device).unsqueeze(-1)
    return pages.view(-1, size).index_select(0, row_NKL.flatten()).view(*row_NKL.shape, size)


def _rows(pages: Tensor) -> Tensor:
    # view, not reshape: a silent copy would swallow the write.
    return pages.view(-1, *pages.shape[2:])
