"""Combine attention kernels of different origin, one per phase, with Triton for all other operations."""

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
    """A `tok_kernels.Backend` with one attention kernel per phase; `planned` names the phases planned on the host.

    Triton computes all other operations. Triton also computes layers with a sliding window, because it masks each row
    of a group by the row's own window. Caches of another dtype than `cache_dtype`, for which the kernels were not
    built, are left to Triton as well (None: the kernels take every dtype).
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
        # Only rows after the decode rows can be padding that no kernel writes.
        out[batch.num_decode :].zero_()
        if batch.num_decode:
            self._kernels["cascade" if batch.levels else "decode"](q_THD, cache, batch, scale, out)
        if q_THD.shape[0] > batch.num_decode and batch.slots.shape[0] > batch.num_decode:
            self._kernels["prefill"](q_THD, cache, batch, scale, out)
        return out


def triton_decode_kernel(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor
) -> None:
    """Compute the phases "decode" and "cascade" with Triton."""
    attend_decode(_operands(q_THD, cache, batch, scale), batch, out_THD)


def triton_prefill_kernel(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor
) -> None:
    """Compute the phase "prefill" with Triton."""
    prefill(_operands(q_THD, cache, batch, scale), batch, out_THD)


def _operands(q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Operands:
    operands = Operands(q_THD, cache, batch.page_table, scale)
    operands.check()
    return operands
