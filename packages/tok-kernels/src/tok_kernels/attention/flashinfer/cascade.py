"""Compute cascade attention with FlashInfer: each group's pages once, each row's own pages, merged by log-sum-exp.

A level is a prefill without a causal mask, in which a group of rows is one request (Ye et al. 2024, "Cascade
inference"). All FlashInfer kernels return log-sum-exps of base 2, and its merge takes them in that base.
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
from tok_kernels.attention.flashinfer.pages import Ints, on_device, page_lists, workers_on_host
from tok_kernels.attention.flashinfer.prefill import PrefillBackend, prefill_wrappers
from tok_kernels.attention.flashinfer.wrappers import (
    PlannedFor,
    WrapperRing,
    first_row,
    flashinfer,
    is_plan_for,
    one_page,
    plan_prefill,
)
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.batch import AttentionBatch, CascadeLevel, HostLevel, LayerCache


@dataclass(frozen=True, slots=True)
class _Level:
    """A planned level and the rows it covers, as a bool tensor; None: all rows."""

    wrapper: Any
    covered: Tensor | None


class FlashInferCascade:
    """The phase "cascade" (see `PhaseKernel`), which needs `batch.host`; the prefixes are read by `kernels`."""

    def __init__(self, shape: AttentionShape, device: torch.device, workspace: Tensor, kernels: PrefillBackend) -> None:
        self._shape = shape
        self._own = FlashInferDecode(shape, device, workspace, tensor_cores=True)
        self._new_wrappers: Callable[[], WrapperRing] = partial(prefill_wrappers, workspace, kernels)
        self._wrappers = [self._new_wrappers()]
        self._planned_for: PlannedFor | None = None
        self._levels: list[_Level] = []
        self._wrappers[0].plan(
            lambda one: plan_prefill(one, shape, first_row(device), one_page(device), causal=False, scale=shape.scale)
        )

    def __call__(self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor) -> None:
        if not is_plan_for(self._planned_for, batch, scale):
            self._levels = self._plan(batch, scale)
            self._planned_for = batch, scale
        rows = slice(batch.num_decode)
        lse = self._own.with_lse(q_THD, cache, batch, scale, out_THD)
        for level in self._levels:
            part, part_lse = level.wrapper.run(q_THD[rows], (cache.k, cache.v), return_lse=True)
            # Merging two partial results without keys would give NaN. Every covered row has keys in `part`.
            flashinfer().merge_state_in_place(out_THD[rows], lse, part, part_lse, level.covered)

    def _plan(self, batch: AttentionBatch, scale: float) -> list[_Level]:
        host = batch.host
        if host is None or len(host.levels) != len(batch.levels):
            held = None if host is None else f"of {len(host.levels)} levels"
            raise ValueError(f"host is {held}; allowed where FlashInfer cascades: HostLengths of {len(batch.levels)}")
        while len(self._wrappers) < len(batch.levels):
            self._wrappers.append(self._new_wrappers())
        levels = zip(self._wrappers, batch.levels, host.levels, strict=False)
        planned = (self._plan_level(*level, batch, scale) for level in levels)
        return [level for level in planned if level is not None]

    def _plan_level(
        self, wrappers: WrapperRing, level: CascadeLevel, host: HostLevel, batch: AttentionBatch, scale: float
    ) -> _Level | None:
        """Return the planned level, or None if no group of the level has keys."""
        device = batch.slots.device
        items = level_items(host, batch.num_decode)
        if not items.covered.any():
            return None
        slot = level.slot[on_device(items.group, device).long()]
        pages = page_lists(batch.page_table, slot, items.start, items.end, self._shape.page_size)
        rows = workers_on_host(items.indptr, device)
        wrapper = wrappers.plan(lambda one: plan_prefill(one, self._shape, rows, pages, causal=False, scale=scale))
        covered = None if items.covered.all() else on_device(items.covered, device).bool()
        return _Level(wrapper, covered)


@dataclass(frozen=True, slots=True)
class LevelItems:
    """The I items of a level.

    indptr      [I + 1]      first row of each item, and the end of the last
    group       [I]          group whose pages are read; 0 if none
    start, end  [I]          positions `[start[i], end[i])` that the item reads; empty if none
    covered     bool [rows]  rows that receive keys from some group
    """

    indptr: Ints
    group: Ints
    start: Ints
    end: Ints
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
