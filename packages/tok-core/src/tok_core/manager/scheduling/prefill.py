"""Fill a step beside its decode rows: start waiting samples, and compute prompts in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from tok_core.manager.admission import AdmissionPolicy, FairShares, SequenceStarter, StartTurn
from tok_core.manager.faults import Faults, FaultyRequest
from tok_core.manager.requests import Pending
from tok_core.manager.scheduling.batch_builder import BatchBuilder
from tok_core.manager.scheduling.reclaimer import Reclaimer
from tok_core.manager.scheduling.steps_in_flight import Microbatches
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
            running = table.active()
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


class Admitter:
    """Starts as many waiting samples in a step as the admission policy, fair shares and the step's budget allow."""

    def __init__(
        self,
        starter: SequenceStarter,
        fair_shares: FairShares,
        admission: AdmissionPolicy,
        microbatches: Microbatches,
        reclaimer: Reclaimer,
        prefill: ChunkedPrefill,
        faults: Faults,
    ) -> None:
        self._table = starter.table
        self._paging = starter.paging
        self._starter = starter
        self._waiting = starter.waiting
        self._retained_prompts = starter.retained_prompts
        self._fair_shares = fair_shares
        self._admission = admission
        self._microbatches = microbatches
        self._reclaimer = reclaimer
        self._prefill = prefill
        self._faults = faults

    def admit(self, builder: BatchBuilder, decode: Int64, budget: int, computed: int) -> int:
        """Start waiting samples in order while budget, slots and the policy allow; return the budget left.

        Samples that have waited too long start whatever the policy says, and take precedence over rows of `decode`.
        `computed`: tokens computed before this step.
        """
        due = self._fair_shares.due
        behind = int(np.count_nonzero(~self._table.granted[decode])) if due else 0
        if budget + behind <= 0 or not self._waiting:
            return budget
        self._admission.account(computed, self._starter.recomputed_tokens)
        allowed, chosen = self._count(self._waiting.classes(), max(budget, 1))
        if due and chosen:
            allowed = max(allowed, min(due, self._starter.unreserved_slots))
        return self._start(builder, chosen, allowed, budget, behind)

    def admit_due(self, builder: BatchBuilder, decode: Int64, budget: int) -> int:
        """Start only samples that have waited too long; return the budget left."""
        classes = self._waiting.classes()[:1]
        allowed = min(self._fair_shares.due, self._starter.unreserved_slots)
        behind = int(np.count_nonzero(~self._table.granted[decode]))
        if allowed <= 0:
            return budget
        return self._start(builder, list(self._fair_shares.turns(allowed, classes)), allowed, budget, behind)

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
            allowed, chosen = self._count([priority], budget + behind, priority)
            short = allowed - table.free_slots - int(np.count_nonzero(table.state == State.PREEMPTED))
            if short > 0:
                self._reclaimer.preempt_for_slots(self._reclaimer.rank_below(priority, builder.busy)[:short])
            budget = self._start(builder, chosen, min(allowed, table.free_slots), budget, behind, priority)
            if waiting.queues(priority):
                break
        return budget

    def _count(self, classes: list[int], tokens: int, priority: int | None = None) -> tuple[int, list[StartTurn]]:
        """Return how many waiting samples of these classes may start, and in which turns; 0 if a request is faulty."""
        turns = partial(self._fair_shares.turns, classes=classes)
        try:
            return self._admission.count(turns, self._microbatches.cycles, tokens, priority)
        except FaultyRequest as faulty:
            self._faults.add(faulty.rid, faulty.error)
            return 0, []

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
        above, due = priority is not None, 0 if priority is not None else self._fair_shares.due
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
                self._faults.add(pending.request.rid, error)
                return min(budget, 0)  # unknown: the failed start may have used some of it
            if due:
                self._table.granted[slots] = True
                due = self._fair_shares.due = max(0, due - started)
            allowed, budget = allowed - started, budget - tokens
            if not started or (len(slots) and not tokens):
                break  # no pages: a later step goes on
        return budget

    def _start_one(
        self, builder: BatchBuilder, pending: Pending, most: int, room: int, priority: int | None
    ) -> tuple[Sequence[int] | Int64, int, int]:
        """Start samples that were taken from the queue; return slots, samples started, and their tokens in the step."""
        retained = self._retained_prompts.find(pending.request) if pending.fresh else None
        if retained is not None:
            most = min(most, room)
            if priority is not None:
                self._reclaimer.make_room_above(most, priority, builder.busy)
            slots = self._starter.start_late(retained, pending, most, builder.step)
            if len(slots):
                builder.start(slots)
            return slots, len(slots), len(slots)
        if pending.fresh and pending.request.leader is not None:
            return [], self._starter.follow(pending, most), 0
        slot, forks = self._starter.lead(pending, most)
        if priority is not None:
            end = min(int(self._table.target[slot]), int(self._table.length[slot]) + room)
            self._reclaimer.make_room_above(self._paging.missing(slot, end), priority, builder.busy)
        # A requeued sample may be older than others of this step, but must not preempt them now.
        return [slot], 1 + forks, self._prefill.schedule(builder, slot, room, preempting=False)
