"""Choose which running sequence is preempted when no pages are left."""

from __future__ import annotations

import numpy as np

from tok_core.manager.kv_cache.paging import Paging
from tok_core.messages import Int64


def choose_victim(paging: Paging, slots: Int64) -> int:
    """Return the one of `slots`, int64 [n] and not empty, that is preempted.

    Candidates are narrowed down in this order:

    1. sequences of the lowest class;
    2. sequences of callers that hold at least the mean number of slots;
    3. without sequences that were started because they had waited too long, if others are left;
    4. without sequences preempted before, while a younger one is left that was not.

    Of these, the sequence with the least work lost is preempted; of equals, the youngest. The work lost is the tokens
    in pages that no other sequence holds, which have to be computed again. Sequences without a page of their own come
    last.
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
    """Return `slots`, int64 [n], lowest class first and within it least work lost first, and the tokens each loses."""
    table = paging.table
    common = paging.depth_in_common(slots)
    lost = table.length[slots] - common * table.page_size
    nothing = table.num_pages[slots] == common
    ranked = np.lexsort((-table.order[slots], lost, nothing, -table.priority[slots]))
    return slots[ranked], lost[ranked]
