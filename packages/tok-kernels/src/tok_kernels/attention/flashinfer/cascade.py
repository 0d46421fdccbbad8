"""Compute cascade attention with FlashInfer: read shared pages once per group, then each row's own pages, and merge.

A cascade level is a prefill without a causal mask, in which a group of rows is one request (Ye et al. 2024, "Cascade
inference"). FlashInfer's kernels return base-2 log-sum-exps, and its merge expects that base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tok_kernels.attention.flashinfer.decode import FlashInferDecode
from tok_kernels.attention.flashinfer.pages import Int32Array, on_device, on_host, page_lists
from tok_kernels.attention.flashinfer.prefill import PrefillBackend, prefill_wrappers
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
from tok_kernels.batch import AttentionBatch, CascadeLevel, HostLevel, LayerCache


@dataclass(frozen=True, slots=True)
class _Level:
    """A planned level.

    wrapper  the FlashInfer wrapper that holds the plan
    covered  bool [num_decode], rows that are in a group of the level; None: all rows
    """

    wrapper: Any
    covered: Tensor | None


class FlashInferCascade:
    """The phase "cascade" (`PhaseKernel`), which needs `batch.host`. `backend` computes the shared prefixes.

    Each level has its own ring of wrappers. Plans are made in the first layer of a step, and all layers use them.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, workspace: Tensor, backend: PrefillBackend) -> None:
        self._shape = shape
        self._suffix_kernel = FlashInferDecode(shape, device, workspace, tensor_cores=True)
        self._new_ring: Callable[[], WrapperRing] = partial(prefill_wrappers, workspace, backend)
        self._rings = [self._new_ring()]  # one for each level
        self._planned_for: PlannedFor | None = None
        self._levels: list[_Level] = []
        self._rings[0].plan(
            lambda wrapper: plan_prefill(
                *(wrapper, shape, one_item_indptr(device), one_page(device)), causal=False, scale=shape.scale
            )
        )

    def __call__(self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor) -> None:
        if not is_plan_for(self._planned_for, batch, scale):
            self._levels = self._plan(batch, scale)
            self._planned_for = batch, scale
        rows = slice(batch.num_decode)
        lse = self._suffix_kernel.run_with_lse(q_THD, cache, batch, scale, out_THD)
        for level in self._levels:
            prefix_out, prefix_lse = level.wrapper.run(q_THD[rows], (cache.k, cache.v), return_lse=True)
            # A merge of two partial results without keys would give NaN. Every covered row has a prefix with keys.
            flashinfer().merge_state_in_place(out_THD[rows], lse, prefix_out, prefix_lse, level.covered)
        multiply_by_v_scale(out_THD[rows], cache)

    def _plan(self, batch: AttentionBatch, scale: float) -> list[_Level]:
        """Return the planned levels. Raises ValueError if `batch.host` lacks a level."""
        host = batch.host
        if host is None or len(host.levels) != len(batch.levels):
            given = None if host is None else f"HostLengths of {len(host.levels)} levels"
            raise ValueError(
                f"host is {given}; allowed if FlashInfer cascades: HostLengths of {len(batch.levels)} levels"
            )
        while len(self._rings) < len(batch.levels):
            self._rings.append(self._new_ring())
        levels = zip(self._rings, batch.levels, host.levels, strict=False)
        planned = (self._plan_level(*level, batch, scale) for level in levels)
        return [level for level in planned if level is not None]

    def _plan_level(
        self, ring: WrapperRing, level: CascadeLevel, host: HostLevel, batch: AttentionBatch, scale: float
    ) -> _Level | None:
        """Return the planned level, or None if no group of the level has keys."""
        device = batch.slots.device
        items = level_items(host, batch.num_decode)
        if not items.covered.any():
            return None
        slot = level.slot[on_device(items.group, device).long()]
        pages = page_lists(batch.page_table, slot, items.start, items.end, self._shape.page_size)
        indptr = on_host(items.indptr, device)
        wrapper = ring.plan(
            lambda wrapper: plan_prefill(wrapper, self._shape, indptr, pages, causal=False, scale=scale)
        )
        covered = None if items.covered.all() else on_device(items.covered, device).bool()
        return _Level(wrapper, covered)


@dataclass(frozen=True, slots=True)
class LevelItems:
    """A level as I prefill items: one for each group of rows, and one without keys for each run of rows between groups.

    FlashInfer's queries must be contiguous, so rows in no group need an item, too. For example, 6 rows with groups of
    the rows 1–2 and 4 have the items 0, 1–2, 3, 4 and 5. The first, third and last of these have no keys.

    indptr      int32 [I + 1]  first row of each item, and the end of the last
    group       int32 [I]      group whose pages are read; 0 if none
    start, end  int32 [I]      positions `[start[i], end[i])` that the item reads; empty if it is no group
    covered     bool [rows]    rows of items that have keys
    """

    indptr: Int32Array
    group: Int32Array
    start: Int32Array
    end: Int32Array
    covered: NDArray[np.bool_]


def level_items(level: HostLevel, rows: int) -> LevelItems:
    """Return the items of a level over the first `rows` decode rows."""
    used = np.flatnonzero((level.row_count > 0) & (level.kv_end > level.kv_start))
    first = level.row_start[used]
    bounds = np.unique(np.concatenate(([0, rows], first, first + level.row_count[used])))
    item = np.searchsorted(bounds, first)
    group, start, end = np.zeros((3, len(bounds) - 1), np.int32)
    group[item], start[item], end[item] = used, level.kv_start[used], level.kv_end[used]
    covered = np.repeat(end > start, np.diff(bounds))
    return LevelItems(bounds.astype(np.int32), group, start, end, covered)
