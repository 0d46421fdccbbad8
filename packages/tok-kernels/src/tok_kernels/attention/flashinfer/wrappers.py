"""Plan FlashInfer's wrappers, several in turn, so that no plan overwrites one that the device has yet to read.

A wrapper writes its plan to pinned memory, which is then copied to the device. If steps are launched ahead, the copy
may still be queued when the next step is planned. So a ring of wrappers takes turns, and a wrapper is planned only
after its last copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tok_kernels.attention.flashinfer.pages import PageLists, on_host
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.batch import AttentionBatch, LayerCache

WRAPPERS_IN_RING = 3
_MIN_WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommended size
_SPARE_BYTES = 8 << 20  # for what FlashInfer stores beside partial outputs, such as log-sum-exps
_TILE_ROWS = 128  # query rows of FlashInfer's largest tile
_load_built = False  # set by `load_built_modules`


def flashinfer() -> ModuleType:
    """Import the package flashinfer at first use, which takes seconds, and return it.

    Raises ImportError if it is not installed.
    """
    module = import_module("flashinfer")
    if _load_built:
        environment: Any = import_module("flashinfer.jit.env")
        if not environment.FLASHINFER_AOT_DIR.exists():  # an installation with ahead-of-time modules needs no others
            environment.FLASHINFER_AOT_DIR = environment.FLASHINFER_JIT_DIR
    return module


def load_built_modules() -> None:
    """From now on, load the modules in FlashInfer's JIT cache without checking them.

    FlashInfer would otherwise build them again, with the CUDA toolkit, after their directory was moved.
    """
    global _load_built
    _load_built = True


def new_workspace(shape: AttentionShape, device: torch.device) -> Tensor:
    """Return zeroed memory for split-KV partial results; wrappers of one stream may share it.

    It holds two tiles of query rows for each multiprocessor and query head of a group, which keep the GPU busy.
    """
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    partial = programs * shape.group * _TILE_ROWS * shape.head_dim * 4
    return torch.zeros(max(_MIN_WORKSPACE_BYTES, partial + _SPARE_BYTES), dtype=torch.uint8, device=device)


PlannedFor = tuple[AttentionBatch, float]
"""The batch and the scale of the scores for which a plan was made."""


def is_plan_for(planned_for: PlannedFor | None, batch: AttentionBatch, scale: float) -> bool:
    """Return whether a plan was made for this batch object and this scale."""
    return planned_for is not None and planned_for[0] is batch and planned_for[1] == scale


class WrapperRing:
    """`WRAPPERS_IN_RING` FlashInfer wrappers, planned in turn."""

    def __init__(self, new_wrapper: Callable[[], Any]) -> None:
        self._wrappers = [new_wrapper() for _ in range(WRAPPERS_IN_RING)]
        self._copied: list[torch.cuda.Event | None] = [None] * WRAPPERS_IN_RING
        self._turn = 0

    def plan(self, plan: Callable[[Any], None]) -> Any:
        """Plan the next wrapper with `plan` and return it; the next WRAPPERS_IN_RING − 1 plans leave this one valid."""
        turn = self._turn = (self._turn + 1) % len(self._wrappers)
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        plan(self._wrappers[turn])
        self._copied[turn] = torch.cuda.current_stream().record_event()
        return self._wrappers[turn]


def plan_prefill(
    wrapper: Any, shape: AttentionShape, q_indptr: Tensor, pages: PageLists, *, causal: bool, scale: float
) -> None:
    """Plan a prefill wrapper; the queries of item i are the rows `[q_indptr[i], q_indptr[i + 1])`."""
    wrapper.plan(
        *(q_indptr, pages.indptr, pages.indices, pages.last_page_len),
        *(shape.heads, shape.kv_heads, shape.head_dim, shape.page_size),
        causal=causal,
        sm_scale=scale,
        q_data_type=shape.dtype,
        kv_data_type=shape.cache_dtype,
        seq_lens=pages.length,
    )


def plan_decode(wrapper: Any, shape: AttentionShape, pages: PageLists, *, scale: float) -> None:
    """Plan a decode wrapper; the query of item i is row i."""
    wrapper.plan(
        *(pages.indptr, pages.indices, pages.last_page_len),
        *(shape.heads, shape.kv_heads, shape.head_dim, shape.page_size),
        sm_scale=scale,
        q_data_type=shape.dtype,
        kv_data_type=shape.cache_dtype,
        seq_lens=pages.length,
    )


def multiply_by_v_scale(out_RHD: Tensor, cache: LayerCache) -> None:
    """Multiply output rows by the cache's per-head `v_scale` in place, if it has one.

    The `v_scale` of FlashInfer 0.6 is one number for all heads, and costs a launch as well.
    """
    if cache.v_scale is not None:
        torch.unflatten(out_RHD, 1, (len(cache.v_scale), -1)).mul_(cache.v_scale.view(-1, 1, 1))


def one_page(device: torch.device) -> PageLists:
    """Return the page list of one item with one page, whose plan makes FlashInfer build or load its modules."""
    one = torch.ones(1, dtype=torch.int32)
    return PageLists(one_item_indptr(device), one, one, torch.zeros(1, dtype=torch.int32, device=device))


def one_item_indptr(device: torch.device) -> Tensor:
    """Return the `indptr` of one item with one row or one page: [0, 1]."""
    return on_host(torch.arange(2).numpy(), device)
