"""Start waiting samples in a step, beside its decode rows and the prompts that are being computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from tok_core.manager.admission import AdmissionPolicy, FairShares, SequenceStarter, StartTurn
from tok_core.manager.faults import Faults, FaultyRequest
from tok_core.manager.requests import Pending
from tok_core.manager.scheduling.batch_builder import BatchBuilder
from tok_core.manager.scheduling.prefill import ChunkedPrefill
from tok_core.manager.scheduling.reclaimer import Reclaimer
from tok_core.manager.scheduling.steps_in_flight import Microbatches
from tok_core.manager.sequences import State
from tok_core.messages import Int64


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

        Samples that have waited too long may start beyond what the policy allows, if slots and pages are free. They
        take precedence over rows of `decode`.
        `computed`: tokens computed before this step.
        """
        overdue = self._fair_shares.overdue
        displaceable_rows = int(np.count_nonzero(~self._table.started_overdue[decode])) if overdue else 0
        if budget + displaceable_rows <= 0 or not self._waiting:
            return budget
        self._admission.observe(computed, self._starter.recomputed_tokens)
        allowed, chosen = self._count(self._waiting.classes(), max(budget, 1))
        if overdue and chosen:
            allowed = max(allowed, min(overdue, self._starter.unreserved_slots))
        return self._start(builder, chosen, allowed, budget, displaceable_rows)

    def admit_overdue(self, builder: BatchBuilder, decode: Int64, budget: int) -> int:
        """Start only samples that have waited too long; return the budget left."""
        classes = self._waiting.classes()[:1]
        allowed = min(self._fair_shares.overdue, self._starter.unreserved_slots)
        displaceable_rows = int(np.count_nonzero(~self._table.started_overdue[decode]))
        if allowed <= 0:
            return budget
        return self._start(builder, list(self._fair_shares.turns(allowed, classes)), allowed, budget, displaceable_rows)

    def admit_above(self, builder: BatchBuilder, decode: Int64, budget: int, lowest: int) -> int:
        """Start waiting samples of classes above `lowest` in place of lower ones; return the budget left.

        A budget below 0 means that as many rows of lower classes in `decode` skip this step. The slot of a preempted
        sequence becomes free when its last token is back.
        """
        table, waiting = self._table, self._waiting
        for priority in [one for one in waiting.classes() if one < lowest]:
            displaceable_rows = int(np.count_nonzero(table.priority[decode] > priority))
            if budget + displaceable_rows <= 0:
                break
            allowed, chosen = self._count([priority], budget + displaceable_rows, priority)
            short = allowed - table.free_slots - int(np.count_nonzero(table.state == State.PREEMPTED))
            if short > 0:
                self._reclaimer.preempt_for_slots(self._reclaimer.rank_below(priority, builder.busy)[:short])
            budget = self._start(builder, chosen, min(allowed, table.free_slots), budget, displaceable_rows, priority)
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
        displaceable_rows: int,
        priority: int | None = None,
    ) -> int:
        """Start at most `allowed` samples whose turn it is; return the budget left.

        displaceable_rows  decode rows that may skip this step in favour of these samples, or of overdue ones
        priority           lower classes than this one give up what they hold; None: no class does
        """
        above, overdue = priority is not None, 0 if priority is not None else self._fair_shares.overdue
        for pending, samples in turns:
            room = budget + (displaceable_rows if above or overdue else 0)
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
            if overdue:
                self._table.started_overdue[slots] = True
                overdue = self._fair_shares.overdue = max(0, overdue - started)
            allowed, budget = allowed - started, budget - tokens
            if not started or (len(slots) and not tokens):
                break  # no pages: a later step continues
        return budget

    def _start_one(
        self, builder: BatchBuilder, pending: Pending, most: int, room: int, priority: int | None
    ) -> tuple[Sequence[int] | Int64, int, int]:
        """Start samples that were taken from the queue; return slots, samples started, and their tokens in the step."""
        retained = self._retained_prompts.find(pending.request) if pending.fresh else None
        if retained is not None:
            most = min(most, room)
            if priority is not None:
                self._reclaimer.free_pages_for_class(most, priority, builder.busy)
            slots = self._starter.start_late(retained, pending, most, builder.step)
            if len(slots):
                builder.start(slots)
            return slots, len(slots), len(slots)
        if pending.fresh and pending.request.leader is not None:
            return [], self._starter.follow(pending, most), 0
        slot, forks = self._starter.lead(pending, most)
        if priority is not None:
            end = min(int(self._table.target[slot]), int(self._table.length[slot]) + room)
            self._reclaimer.free_pages_for_class(self._paging.missing(slot, end), priority, builder.busy)
        # A requeued sample may be older than others of this step, but must not preempt them now.
        return [slot], 1 + forks, self._prefill.schedule(builder, slot, room, preempting=False)
