"""PreemptionPolicy: the protocol of rules that choose which running sequences lose their slots and pages; one rule."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tok_core.manager.kv_cache.paging import Paging
from tok_core.messages import Int64


class PreemptionPolicy(Protocol):
    """Rule by which running sequences are preempted; the scheduler, the admitter and fair shares use the same one."""

    def choose(self, slots: Int64) -> int:
        """Return the one of `slots`, int64 [n] and not empty, that is preempted because no pages are left."""
        ...

    def rank(self, slots: Int64) -> tuple[Int64, Int64]:
        """Return `slots`, the first to be preempted first, and the tokens that each would have to compute again."""
        ...


class LeastWorkLost:
    """Preempts the lowest class first, and within it the sequence that loses the least work; of equals, the youngest.

    The lowest class is the one of the greatest `priority`.
    The work lost is the tokens in pages that no other sequence holds. Sequences without a page of their own come last.
    """

    def __init__(self, paging: Paging) -> None:
        self._paging = paging

    def choose(self, slots: Int64) -> int:
        """Return the first by `rank` of candidates that are narrowed down in this order:

        1. sequences of the lowest class, which has the greatest `priority`;
        2. sequences of callers that hold at least the mean number of slots;
        3. without sequences that were started because they had waited too long, if others are left;
        4. without sequences preempted before, while a younger one is left that was not.
        """
        table = self._paging.table
        lowest = table.priority[slots]
        slots = slots[lowest == lowest.max()]
        _, owner, held = np.unique(table.account[slots], return_inverse=True, return_counts=True)
        if len(held) > 1:
            slots = slots[held[owner] >= held.mean()]
        if not table.started_overdue[slots].all():
            slots = slots[~table.started_overdue[slots]]
        order, before = table.order[slots], table.preempted[slots]
        slots = slots[~before | (order > order[~before].max(initial=-1))]
        return int(self.rank(slots)[0][0])

    def rank(self, slots: Int64) -> tuple[Int64, Int64]:
        """See `PreemptionPolicy`."""
        table = self._paging.table
        common = self._paging.depth_in_common(slots)
        lost = table.length[slots] - common * table.page_size
        nothing = table.num_pages[slots] == common
        ranked = np.lexsort((-table.order[slots], lost, nothing, -table.priority[slots]))
        return slots[ranked], lost[ranked]
