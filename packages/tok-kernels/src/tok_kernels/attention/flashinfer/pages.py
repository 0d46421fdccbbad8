"""Page lists as FlashInfer wants them: lengths counted on the host, page ids gathered on the device.

Axes: I items (sequences or groups), N pages of all items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageLists:
    """`indptr` `[I + 1]`, `last_page_len` and `length` `[I]` on the host, `indices` `[N]` on the device; int32."""

    indptr: Tensor
    last_page_len: Tensor
    length: Tensor
    indices: Tensor


def page_lists(page_table: Tensor, slot_I: Tensor, start: Ints, end: Ints, page_size: int) -> PageLists:
    """The pages of the positions `[start[i], end[i])` of slot `slot_I[i]`; none where `end[i] <= start[i]`.

    Nothing waits for the device. Raises ValueError where a start lies within a page.
    """
    if (start % page_size).any():
        within = int(start[start % page_size != 0][0])
        raise ValueError(f"kv_start is {within}; allowed: multiples of the page size ({page_size})")
    length = np.maximum(end - start, 0)
    count = -(-length // page_size)
    indptr = np.concatenate(([0], np.cumsum(count)))
    last_page_len = np.where(count > 0, length - (count - 1) * page_size, 0)
    # The page of an item at place p of all lies at index p − shift of its row of the table.
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
    """int32 in memory that `device` reads without the host waiting."""
    host = torch.from_numpy(values.astype(np.int32))
    return host.pin_memory() if device.type == "cuda" else host


def on_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """int32 on the device, copied without waiting for it."""
    return on_host(values, device).to(device, non_blocking=True)
