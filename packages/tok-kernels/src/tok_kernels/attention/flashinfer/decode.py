"""Compute decode attention with FlashInfer: one query per sequence over its own pages, planned once per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tok_kernels.attention.flashinfer.pages import page_lists
from tok_kernels.attention.flashinfer.wrappers import (
    PlannedFor,
    WrapperRing,
    flashinfer,
    is_plan_for,
    multiply_by_v_scale,
    one_page,
    plan_decode,
)
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.batch import AttentionBatch, LayerCache


class FlashInferDecode:
    """The phase "decode" (`PhaseKernel`), which needs `batch.host`.

    `tensor_cores` are faster if several query heads share a key/value head. Without them, FlashInfer supports groups of
    1, 2, 3, 4 or 8 query heads. Its planning reads every length in Python: about 15 ms for 8192 sequences.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, workspace: Tensor, *, tensor_cores: bool) -> None:
        wrapper_type = flashinfer().BatchDecodeWithPagedKVCacheWrapper
        self._shape = shape
        self._ring = WrapperRing(lambda: wrapper_type(workspace, "NHD", use_tensor_cores=tensor_cores))
        self._planned_for: PlannedFor | None = None
        self._wrapper: Any = self._ring.plan(
            lambda wrapper: plan_decode(wrapper, shape, one_page(device), scale=shape.scale)
        )

    def __call__(self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor) -> None:
        rows = slice(batch.num_decode)
        self._plan(batch, scale)
        self._wrapper.run(q_THD[rows], (cache.k, cache.v), out=out_THD[rows])
        multiply_by_v_scale(out_THD[rows], cache)

    def run_with_lse(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor
    ) -> Tensor:
        """Attend to the positions from `kv_start` on, write the outputs, and return the base-2 log-sum-exp.

        Outputs are not yet multiplied by `cache.v_scale`. The log-sum-exp is float32 `[num_decode, H]`. A row without
        keys gets an output of zeros and a log-sum-exp of −inf.
        """
        rows = slice(batch.num_decode)
        self._plan(batch, scale)
        _, lse = self._wrapper.run(q_THD[rows], (cache.k, cache.v), out=out_THD[rows], return_lse=True)
        result: Tensor = lse
        return result

    def _plan(self, batch: AttentionBatch, scale: float) -> None:
        if is_plan_for(self._planned_for, batch, scale):
            return
        if batch.host is None:
            raise ValueError("host is None; allowed if FlashInfer decodes: HostLengths")
        host, rows = batch.host, slice(batch.num_decode)
        pages = page_lists(
            *(batch.page_table, batch.slots[rows], host.kv_start[rows], host.kv_len[rows]), self._shape.page_size
        )
        self._wrapper = self._ring.plan(lambda wrapper: plan_decode(wrapper, self._shape, pages, scale=scale))
        self._planned_for = batch, scale
