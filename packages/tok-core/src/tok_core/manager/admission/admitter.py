"""Start waiting samples, within what the step, slots and pages allow, or in place of lower classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tok_core.manager.admission.fair_shares import StartTurn
from tok_core.manager.batch import BatchBuilder
from tok_core.manager.faults import FaultyRequest
from tok_core.manager.sequences import Pending, State
from tok_core.messages import Int64

if TYPE_CHECKING:
    from tok_core.manager.scheduler import Scheduler


class Admitter:
    """Part of `scheduler` that starts its waiting samples."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._table = scheduler.table
        self._paging = scheduler.paging
        self._starts = scheduler.starter
        self._waiting = scheduler.waiting
        self._shares = scheduler.fair_shares
        self._admission = scheduler.admission
        self._microbatches = scheduler.microbatches

    def admit(self, builder: BatchBuilder, decode: Int64, budget: int) -> int:
        """Start waiting samples in order while budget, slots and the forecast allow; return the budget left.

        Samples that have waited too long start whatever the forecast says, and take precedence over rows of `decode`.
        """
        due = self._shares.due
        behind = int(np.count_nonzero(~self._table.granted[decode])) if due else 0
        if budget + behind <= 0 or not self._waiting:
            return budget
        reserved = self._reserved()
        self._admission.account(self._scheduler.computed_tokens, self._starts.computed_twice)
        turns = partial(self._shares.turns, classes=self._waiting.classes())
        cycles, tokens = self._microbatches.cycles, max(budget, 1)
        try:
            allowed, chosen = self._admission.count(turns, self._waiting, reserved, cycles, tokens)
        except FaultyRequest as faulty:
            self._scheduler.faults.add(faulty.rid, faulty.error)
            return budget
        if due:
            allowed = max(allowed, min(due, self._table.free_slots - sum(reserved.values())))
        return self._start(builder, chosen, allowed, budget, behind)

    def admit_due(self, builder: BatchBuilder, decode: Int64, budget: int) -> int:
        """Start only samples that have waited too long; return the budget left."""
        classes = self._waiting.classes()[:1]
        allowed = min(self._shares.due, self._table.free_slots - sum(self._reserved().values()))
        behind = int(np.count_nonzero(~self._table.granted[decode]))
        if allowed <= 0:
            return budget
        return self._start(builder, list(self._shares.turns(allowed, classes)), allowed, budget, behind)

    def admit_above(self, builder: BatchBuilder, decode: Int64, budget: int, lowest: int) -> int:
        """Start waiting samples of classes above `lowest` in place of lower ones; return the budget left.

        A budget below 0 means that as many rows of lower classes in `decode` skip this step. The slot of a preempted
        sequence becomes free when its last token is back.
        """
        table, waiting = self._table, self._waiting
        for priority in [one for one in waiting.classes() if one < lowest]:
            behind = int(np.count_nonzero(table.priority[decode] > priority))
            if budget + behind <= 0:
                break
            turns = partial(self._shares.turns, classes=[priority])
            cycles, tokens = self._microbatches.cycles, budget + behind
            try:
                allowed, chosen = self._admission.count(turns, waiting, self._reserved(), cycles, tokens, priority)
            except FaultyRequest as faulty:
                self._scheduler.faults.add(faulty.rid, faulty.error)
                break
            short = allowed - table.free_slots - int(np.count_nonzero(table.state == State.PREEMPTED))
            if short > 0:
                victims, _ = self._scheduler.preemption.rank(self._below(priority, builder))
                self._scheduler.preempt_for_slots(victims[:short].tolist())
            budget = self._start(builder, chosen, min(allowed, table.free_slots), budget, behind, priority)
            if waiting.lines(priority):
                break
        return budget

    def _reserved(self) -> dict[int, int]:
        return {slot: len(forks) for slot, forks in self._starts.pending_forks.items()}

    def _below(self, priority: int, builder: BatchBuilder) -> Int64:
        """Return running slots of lower classes, without those that already compute something in this step."""
        running = self._scheduler.running()
        running = running[self._table.priority[running] > priority]
        return running[~np.isin(running, builder.busy)]

    def _clear(self, count: int, priority: int, builder: BatchBuilder) -> None:
        """Free `count` pages, if possible, by evicting retained prompts and preempting slots of lower classes."""
        while not self._scheduler.room_for(count):
            if not self._scheduler.retained_prompts.drop_youngest(priority):
                break
        else:
            return
        for slot in self._scheduler.preemption.rank(self._below(priority, builder))[0].tolist():
            self._scheduler.preempt_for_slots([slot])
            if self._scheduler.room_for(count):
                return

    def _start(
        self,
        builder: BatchBuilder,
        turns: Iterable[StartTurn],
        allowed: int,
        budget: int,
        behind: int,
        priority: int | None = None,
    ) -> int:
        """Start at most `allowed` samples whose turn it is; return the budget left.

        behind    decode rows that may skip this step in favour of these samples, or of those that are due
        priority  lower classes than this one give up what they hold; None: no class does
        """
        above, due = priority is not None, 0 if priority is not None else self._shares.due
        for pending, samples in turns:
            room = budget + (behind if above or due else 0)
            most = min(samples, allowed)
            if most <= 0 or room <= 0:
                break
            if not self._waiting.take(pending):
                continue  # an earlier turn has started these samples
            try:
                slots, started, tokens = self._start_one(builder, pending, most, room, priority)
            except Exception as error:
                self._scheduler.faults.add(pending.request.rid, error)
                return min(budget, 0)  # unknown: the failed start may have used some of it
            if due:
                self._table.granted[slots] = True
                due = self._shares.due = max(0, due - started)
            allowed, budget = allowed - started, budget - tokens
            if not started or (len(slots) and not tokens):
                break  # no pages: a later step goes on
        return budget

    def _start_one(
        self, builder: BatchBuilder, pending: Pending, most: int, room: int, priority: int | None
    ) -> tuple[Sequence[int] | Int64, int, int]:
        """Start samples that were taken from the queue; return slots, samples started, and their tokens in the step."""
        retained = self._scheduler.retained_prompts.find(pending.request) if pending.fresh else None
        if retained is not None:
            most = min(most, room)
            if priority is not None:
                self._clear(most, priority, builder)
            slots = self._starts.start_late(retained, pending, most, self._scheduler.steps + 1)
            if len(slots):
                builder.start(slots)
            return slots, len(slots), len(slots)
        if pending.fresh and pending.request.leader is not None:
            return [], self._starts.follow(pending, most), 0
        slot, forks = self._starts.lead(pending, most)
        if priority is not None:
            end = min(int(self._table.target[slot]), int(self._table.length[slot]) + room)
            self._clear(self._paging.missing(slot, end), priority, builder)
        # A requeued sample may be older than others of this step, but must not preempt them now.
        return [slot], 1 + forks, self._scheduler.prefill(builder, slot, room, preempting=False)
