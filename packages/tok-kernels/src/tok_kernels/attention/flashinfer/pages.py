"""Build page lists in FlashInfer's format: count pages on the host, and gather page ids on the device.

Axes: I items (sequences or groups), N pages of all items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageLists:
    """Page lists of I items, all int32.

    indptr         [I + 1]  on the host    first page of each item in `indices`, and the end of the last
    last_page_len  [I]      on the host    positions in the item's last page
    length         [I]      on the host    positions of the item
    indices        [N]      on the device  page ids
    """

    indptr: Tensor
    last_page_len: Tensor
    length: Tensor
    indices: Tensor


def page_lists(page_table: Tensor, slot_I: Tensor, start: Int32Array, end: Int32Array, page_size: int) -> PageLists:
    """Return the pages of the positions `[start[i], end[i])` of slot `slot_I[i]`; none if `end[i] <= start[i]`.

    The host never waits for the device. Raises ValueError if a start is not a multiple of the page size.
    """
    if (start % page_size).any():
        unaligned = int(start[start % page_size != 0][0])
        raise ValueError(f"kv_start is {unaligned}; allowed: multiples of the page size ({page_size})")
    length = np.maximum(end - start, 0)
    count = -(-length // page_size)
    indptr = np.concatenate(([0], np.cumsum(count)))
    last_page_len = np.where(count > 0, length - (count - 1) * page_size, 0)
    # Entry n of `indices` is entry n − shift of the item's page table row.
    shift = indptr[:-1] - start // page_size
    device = page_table.device
    count_I, shift_I = on_device(np.stack((count, shift)), device)
    total = int(indptr[-1])
    item_N = torch.repeat_interleave(count_I, output_size=total)
    index_N = torch.arange(total, dtype=torch.int32, device=device) - shift_I[item_N]
    return PageLists(
        indptr=on_host(indptr, device),
        last_page_len=on_host(last_page_len, device),
        length=on_host(length, device),
        indices=page_table[slot_I[item_N].long(), index_N.long()],
    )


def on_host(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return the values as int32 in host memory (pinned for CUDA) that `device` can copy without the host waiting."""
    host = torch.from_numpy(values.astype(np.int32))
    return host.pin_memory() if device.type == "cuda" else host


def on_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return the values as int32 on the device, copied without waiting for it."""
    return on_host(values, device).to(device, non_blocking=True)
