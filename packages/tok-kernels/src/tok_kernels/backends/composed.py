"""A backend whose phases of attention are computed by kernels of different origin, and all else by Triton."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tok_kernels.attention.phases import Phase, PhaseKernel
from tok_kernels.attention.triton.cascade import attend_decode
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.prefill import prefill
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.batch import AttentionBatch, LayerCache


class ComposedBackend(TritonBackend):
    """`tok_kernels.Backend` with a kernel for each phase; `planned` are those that are planned on the host.

    Layers with a sliding window are computed by Triton, which masks each row of a group by its own window; so are
    caches of another dtype than `cache_dtype`, for which the kernels were not made.
    """

    def __init__(
        self,
        name: str,
        kernels: Mapping[Phase, PhaseKernel],
        planned: frozenset[Phase],
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.needs_host_lengths = planned
        self.capturable = not planned & {"decode", "cascade"}
        self._kernels = dict(kernels)
        self._cache_dtype = cache_dtype

    def attention(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        if window is not None or self._cache_dtype not in (None, cache.k.dtype):
            return super().attention(q_THD, cache, batch, scale, window)
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        # Only what follows the decode rows can be padding that nobody writes.
        out[batch.num_decode :].zero_()
        if batch.num_decode:
            self._kernels["cascade" if batch.levels else "decode"](q_THD, cache, batch, scale, out)
        if q_THD.shape[0] > batch.num_decode and batch.slots.shape[0] > batch.num_decode:
            self._kernels["prefill"](q_THD, cache, batch, scale, out)
        return out


def triton_rows(q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor) -> None:
    """Triton's decode and cascade."""
    attend_decode(_operands(q_THD, cache, batch, scale), batch, out_THD)


def triton_chunks(q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor) -> None:
    """Triton's prefill."""
    prefill(_operands(q_THD, cache, batch, scale), batch, out_THD)


def _operands(q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Operands:
    operands = Operands(q_THD, cache, batch.page_table, scale)
    operands.check()
    return operands
