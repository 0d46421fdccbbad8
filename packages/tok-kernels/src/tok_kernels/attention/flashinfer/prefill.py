"""Compute prefill attention with FlashInfer: causal, ragged queries over pages, planned once per step."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tok_kernels.attention.flashinfer.pages import on_host, page_lists
from tok_kernels.attention.flashinfer.wrappers import (
    PlannedFor,
    WrapperRing,
    flashinfer,
    is_plan_for,
    multiply_by_v_scale,
    one_item_indptr,
    one_page,
    plan_prefill,
)
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.batch import AttentionBatch, LayerCache

PrefillBackend = Literal["fa2", "fa3"]


def prefill_wrappers(workspace: Tensor, backend: PrefillBackend) -> WrapperRing:
    """Return a ring of prefill wrappers; the backend "fa2" runs on any GPU, "fa3" on Hopper GPUs."""
    wrapper_type = flashinfer().BatchPrefillWithPagedKVCacheWrapper
    return WrapperRing(lambda: wrapper_type(workspace, "NHD", backend=backend))


class FlashInferPrefill:
    """The phase "prefill" (`PhaseKernel`), which needs `batch.host`.

    Raises FlashInfer's errors if its kernels cannot be built.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, workspace: Tensor, backend: PrefillBackend) -> None:
        self._shape = shape
        self._ring = prefill_wrappers(workspace, backend)
        self._planned_for: PlannedFor | None = None
        self._wrapper: Any = self._ring.plan(
            lambda wrapper: plan_prefill(
                *(wrapper, shape, one_item_indptr(device), one_page(device)), causal=True, scale=shape.scale
            )
        )
        self._rows_end = 0  # end of the planned step's query tokens

    def __call__(self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor) -> None:
        if not is_plan_for(self._planned_for, batch, scale):
            self._plan(batch, scale)
            self._planned_for = batch, scale
        rows = slice(batch.num_decode, self._rows_end)
        self._wrapper.run(q_THD[rows], (cache.k, cache.v), out=out_THD[rows])
        multiply_by_v_scale(out_THD[rows], cache)

    def _plan(self, batch: AttentionBatch, scale: float) -> None:
        if batch.host is None:
            raise ValueError("host is None; allowed if FlashInfer prefills: HostLengths")
        host = batch.host
        chunks = slice(batch.num_decode, None)
        pages = page_lists(
            *(batch.page_table, batch.slots[chunks], host.kv_start[chunks], host.kv_len[chunks]),
            self._shape.page_size,
        )
        q_indptr = np.concatenate(([0], np.cumsum(host.q_len[chunks])))
        indptr = on_host(q_indptr, batch.slots.device)
        self._wrapper = self._ring.plan(
            lambda wrapper: plan_prefill(wrapper, self._shape, indptr, pages, causal=True, scale=scale)
        )
        self._rows_end = batch.num_decode + int(q_indptr[-1])
