"""Compute prompts in chunks beside the decode rows of a step."""

from __future__ import annotations

import numpy as np

from tok_core.manager.admission import SequenceStarter
from tok_core.manager.scheduling.batch_builder import BatchBuilder
from tok_core.manager.scheduling.reclaimer import Reclaimer
from tok_core.manager.sequences import State
from tok_core.messages import Int64


class ChunkedPrefill:
    """Prompts that are being computed: their order, their chunks, and the pages for these."""

    def __init__(self, starter: SequenceStarter, reclaimer: Reclaimer) -> None:
        self._table = starter.table
        self._paging = starter.paging
        self._starter = starter
        self._retained_prompts = starter.retained_prompts
        self._reclaimer = reclaimer

    def slots(self) -> Int64:
        """Return the prefilling slots: higher classes first; within a class, overdue ones first, then by arrival."""
        table, slots = self._table, self._table.in_state(State.PREFILL)
        in_order: Int64 = slots[np.lexsort((table.order[slots], ~table.started_overdue[slots], table.priority[slots]))]
        return in_order

    def displaceable_rows(self, slot: int, decode: Int64, budget: int) -> int:
        """Return how many rows of `decode` may skip this step so that `slot` can prefill."""
        table = self._table
        if budget >= table.target[slot] - table.length[slot]:
            return 0
        displaceable = table.priority[decode] > table.priority[slot]
        if table.started_overdue[slot]:
            displaceable |= (table.priority[decode] == table.priority[slot]) & ~table.started_overdue[decode]
        return int(np.count_nonzero(displaceable & (table.state[decode] == State.DECODE)))

    def schedule(self, builder: BatchBuilder, slot: int, budget: int, *, preempting: bool) -> int:
        """Schedule the next chunk of `slot`; return its number of tokens, 0 if there are no pages for it.

        `preempting`: whether sequences of lower rank may be preempted for these pages.
        """
        table, paging = self._table, self._paging
        if preempting:  # otherwise `SequenceStarter.lead` has just done so
            self._starter.adopt(slot)
        start = int(table.length[slot])
        count = min(budget, int(table.target[slot]) - start)
        missing = paging.missing(slot, start + count)
        if not (
            self._free_pages_by_preempting(builder, missing, slot)
            if preempting
            else self._reclaimer.free_pages(missing)
        ):
            return 0
        paging.reserve(slot, start + count)
        builder.chunk(slot, start, count)
        table.length[slot] = start + count
        paging.publish(slot)
        if start + count == table.target[slot]:
            forks = self._starter.finish_prefill(slot, builder.step)
            builder.add_sampling(slot, forks)
            # Forks have the same length and limit as their leader.
            state = State.DRAIN if table.length[slot] + 1 >= table.limit[slot] else State.DECODE
            table.state[slot] = state
            if len(forks):
                table.state[forks] = state
        return count

    def _free_pages_by_preempting(self, builder: BatchBuilder, count: int, slot: int) -> bool:
        """Free `count` pages for `slot`, preempting sequences of lower rank if needed; return whether they are free."""
        table = self._table
        while not self._reclaimer.free_pages(count):
            if self._retained_prompts.drop_lowest_ranked():
                continue
            running = table.active()
            priority, order = table.priority[running], table.order[running]
            same, younger = priority == table.priority[slot], order > table.order[slot]
            spared = table.started_overdue[running]
            same &= (~spared | younger) if table.started_overdue[slot] else (~spared & younger)
            later = running[same | (priority > table.priority[slot])]
            later = later[~np.isin(later, builder.busy)]
            if not len(later):
                return False
            self._reclaimer.preempt_one_for_pages(later)
        return True
