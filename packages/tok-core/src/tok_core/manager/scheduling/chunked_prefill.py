"""Compute prompts in chunks beside decode rows, as many tokens a step as its budget leaves."""

from __future__ import annotations

import numpy as np

from tok_core.manager.admission import SequenceStarter
from tok_core.manager.batch import BatchBuilder
from tok_core.manager.kv_cache import Paging
from tok_core.manager.scheduling.reclaimer import Reclaimer
from tok_core.manager.sequences import SequenceTable, State
from tok_core.messages import Int64


class ChunkedPrefill:
    """Prompts that are being computed: their order, their chunks, and the pages for these."""

    def __init__(self, table: SequenceTable, paging: Paging, starter: SequenceStarter, reclaimer: Reclaimer) -> None:
        self._table = table
        self._paging = paging
        self._starter = starter
        self._retained_prompts = starter.retained_prompts
        self._reclaimer = reclaimer

    def slots(self) -> Int64:
        """Return the prefilling slots: higher classes first; within a class, granted slots first, then by arrival."""
        table, slots = self._table, self._table.in_state(State.PREFILL)
        in_order: Int64 = slots[np.lexsort((table.order[slots], ~table.granted[slots], table.priority[slots]))]
        return in_order

    def rows_behind(self, slot: int, decode: Int64, budget: int) -> int:
        """Return how many rows of `decode` may skip this step so that `slot` can prefill."""
        table = self._table
        if budget >= table.target[slot] - table.length[slot]:
            return 0
        behind = table.priority[decode] > table.priority[slot]
        if table.granted[slot]:
            behind |= (table.priority[decode] == table.priority[slot]) & ~table.granted[decode]
        return int(np.count_nonzero(behind & (table.state[decode] == State.DECODE)))

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
        if not (self._make_room(builder, missing, slot) if preempting else self._reclaimer.make_room(missing)):
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

    def _make_room(self, builder: BatchBuilder, count: int, slot: int) -> bool:
        """Make `count` pages free for `slot`, preempting sequences of lower rank if needed; return whether they are."""
        table = self._table
        while not self._reclaimer.make_room(count):
            if self._retained_prompts.drop_youngest():
                continue
            running = self._reclaimer.running()
            priority, order = table.priority[running], table.order[running]
            same, younger = priority == table.priority[slot], order > table.order[slot]
            spared = table.granted[running]
            same &= (~spared | younger) if table.granted[slot] else (~spared & younger)
            later = running[same | (priority > table.priority[slot])]
            later = later[~np.isin(later, builder.busy)]
            if not len(later):
                return False
            self._reclaimer.preempt_one(later)
        return True
