"""Victims: which of the running sequences gives up its pages when there are none left."""

from __future__ import annotations

import numpy as np

from tok_core.manager.kv_cache.paging import Paging
from tok_core.messages import Int64


def choose_victim(paging: Paging, slots: Int64) -> int:
    """Return the one of `slots`, int64 [n] and not empty, that is preempted.

    Of the lowest class, and of callers who hold at least the mean number of slots, the one with the least work lost:
    tokens that nobody else holds, which it would have to compute again. Of equals, the youngest. Sequences that were
    started because they had waited too long are spared while others run. Whoever was preempted before is spared while a
    younger one of the class runs that was not, and whoever has no page of its own while another will do.
    """
    table = paging.table
    lowest = table.priority[slots]
    slots = slots[lowest == lowest.max()]
    _, owner, held = np.unique(table.account[slots], return_inverse=True, return_counts=True)
    if len(held) > 1:
        slots = slots[held[owner] >= held.mean()]
    if not table.granted[slots].all():
        slots = slots[~table.granted[slots]]
    order, before = table.order[slots], table.preempted[slots]
    slots = slots[~before | (order > order[~before].max(initial=-1))]
    return int(rank_victims(paging, slots)[0][0])


def rank_victims(paging: Paging, slots: Int64) -> tuple[Int64, Int64]:
    """Return `slots`, int64 [n], lowest class first and in it those with the least work lost, and the tokens lost."""
    table = paging.table
    common = paging.depth_in_common(slots)
    lost = table.length[slots] - common * table.page_size
    nothing = table.num_pages[slots] == common
    ranked = np.lexsort((-table.order[slots], lost, nothing, -table.priority[slots]))
    return slots[ranked], lost[ranked]
