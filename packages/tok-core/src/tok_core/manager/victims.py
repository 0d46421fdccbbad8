"""Victims: which of the running sequences gives up its pages when there are none left."""

from __future__ import annotations

import numpy as np

from tok_core.manager.paging import Paging
from tok_core.messages import Int64


def choose_victim(paging: Paging, slots: Int64) -> int:
    """The one of `slots`, int64 [n] and not empty, that is preempted.

    Of the lowest class, the one with the least work lost: tokens that nobody else holds, which it would have to
    compute again. Of equals, the youngest. Whoever was preempted before is spared while a younger one of the class runs
    that was not, and whoever has no page of its own while another will do.
    """
    table = paging.table
    lowest = table.priority[slots]
    slots = slots[lowest == lowest.max()]
    order, before = table.order[slots], table.preempted[slots]
    slots = slots[~before | (order > order[~before].max(initial=-1))]
    common = paging.depth_in_common(slots)
    lost = table.length[slots] - common * table.page_size
    nothing = table.num_pages[slots] == common
    return int(slots[np.lexsort((-table.order[slots], lost, nothing))[0]])
