"""Compute prefill chunks with FlashInfer: causal attention of ragged queries over pages, planned once per step."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tok_kernels.attention.flashinfer.pages import on_host, page_lists
from tok_kernels.attention.flashinfer.wrappers import (
    PlannedFor,
    WrapperRing,
    first_row,
    flashinfer,
    is_plan_for,
    multiply_by_v_scale,
    one_page,
    plan_prefill,
)
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.batch import AttentionBatch, LayerCache

PrefillBackend = Literal["fa2", "fa3"]


def prefill_wrappers(workspace: Tensor, kernels: PrefillBackend) -> WrapperRing:
    """Return wrappers for items of several queries over one list of pages; "fa2" runs on any GPU, "fa3" on Hopper."""
    make = flashinfer().BatchPrefillWithPagedKVCacheWrapper
    return WrapperRing(lambda: make(workspace, "NHD", backend=kernels))


class FlashInferPrefill:
    """The phase "prefill" (`PhaseKernel`), which needs `batch.host`.

    Raises FlashInfer's errors if its kernels cannot be built.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, workspace: Tensor, kernels: PrefillBackend) -> None:
        self._shape = shape
        self._wrappers = prefill_wrappers(workspace, kernels)
        self._planned_for: PlannedFor | None = None
        self._planned: Any = self._wrappers.plan(
            lambda one: plan_prefill(one, shape, first_row(device), one_page(device), causal=True, scale=shape.scale)
        )
        self._end = 0

    def __call__(self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor) -> None:
        if not is_plan_for(self._planned_for, batch, scale):
            self._plan(batch, scale)
            self._planned_for = batch, scale
        rows = slice(batch.num_decode, self._end)
        self._planned.run(q_THD[rows], (cache.k, cache.v), out=out_THD[rows])
        multiply_by_v_scale(out_THD[rows], cache)

    def _plan(self, batch: AttentionBatch, scale: float) -> None:
        if batch.host is None:
            raise ValueError("host is None; allowed if FlashInfer prefills: HostLengths")
        host, base = batch.host, batch.num_decode
        chunks = slice(base, None)
        pages = page_lists(
            *(batch.page_table, batch.slots[chunks], host.kv_start[chunks], host.kv_len[chunks]),
            self._shape.page_size,
        )
        q_indptr = np.concatenate(([0], np.cumsum(host.q_len[chunks])))
        rows = on_host(q_indptr, batch.slots.device)
        self._planned = self._wrappers.plan(
            lambda one: plan_prefill(one, self._shape, rows, pages, causal=True, scale=scale)
        )
        self._end = base + int(q_indptr[-1])
