"""Choose the tokens that the next step computes, without waiting for the values that earlier steps return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from tok_core.config import MAX_DRAFTING, AdmissionName
from tok_core.manager.admission import FairShares, LengthModel, SequenceStarter, make_admission
from tok_core.manager.faults import Faults
from tok_core.manager.grammar_manager import GrammarManager
from tok_core.manager.kv_cache import LeastWorkLost, Paging
from tok_core.manager.prefix_groups import (
    COSTS,
    CPU_COSTS,
    NO_GROUPS,
    Grouping,
    Groups,
    MostPagesSaved,
    with_drafts,
)
from tok_core.manager.requests import Pending, Request
from tok_core.manager.scheduling.admitter import Admitter
from tok_core.manager.scheduling.batch_builder import BatchBuilder, Changes
from tok_core.manager.scheduling.prefill import ChunkedPrefill
from tok_core.manager.scheduling.reclaimer import Reclaimer
from tok_core.manager.scheduling.steps_in_flight import Microbatches, TokenBudget
from tok_core.manager.sequences import State
from tok_core.manager.speculation import Speculation
from tok_core.manager.stops import StopSets
from tok_core.messages import EngineInfo, Int64, StepInput


class Scheduler:
    """Step scheduler: decode rows first, then prefill chunks in order of arrival, then new samples as memory allows.

    Decode rows include those that verify drafted tokens. Sequences that await values of an earlier step, for their
    drafts or their grammar, sit the step out.

    Requests of a lower `priority` value come first. If slots, pages or tokens of the step run short, lower classes
    (those of higher values) are preempted or wait. Within a class, `FairShares` chooses whose samples start next. When
    pages run out, cached pages are evicted first, then retained prompts; then sequences are preempted
    (`PreemptionPolicy`). A preempted sequence keeps its tokens, waits at its old place in the queue, and prefills again
    what is no longer cached.
    """

    def __init__(
        self,
        info: EngineInfo,
        paging: Paging,
        lengths: LengthModel,
        stops: StopSets,
        grammars: GrammarManager,
        faults: Faults,
        *,
        groups: bool,
        admission: AdmissionName,
        stages: int,
        speculator: Speculation | None,
        clock: Callable[[], float],
    ) -> None:
        self.info = info
        self.speculator = speculator
        self.table = table = paging.table
        self.paging = paging
        self.grammars = grammars
        self.starter = SequenceStarter(paging, stops, clock)
        self.retained_prompts = self.starter.retained_prompts
        self.waiting = self.starter.waiting
        self.faults = faults
        preemption = LeastWorkLost(paging)
        self.fair_shares = FairShares(paging, self.waiting, preemption, clock)
        self.accounts = self.fair_shares.accounts
        self.reclaimer = Reclaimer(self.starter, self.accounts, grammars, preemption, faults)
        self.prefill = ChunkedPrefill(self.starter, self.reclaimer)
        self.admission = make_admission(admission, self.starter, lengths)
        self.microbatches = Microbatches(table, stages)
        self.admitter = Admitter(
            self.starter, self.fair_shares, self.admission, self.microbatches, self.reclaimer, self.prefill, faults
        )
        self.token_budget = TokenBudget(info.max_step_tokens, self.microbatches.count)
        rule = MostPagesSaved(CPU_COSTS if info.device == "cpu" else COSTS)
        self.groupings = [Grouping(paging.tree, rule) for _ in range(self.microbatches.count if groups else 0)]
        self.computed_tokens = 0
        self.group_rows = 0
        self.steps = 0

    def submit(self, request: Request) -> None:
        """Add a new request to the queue.

        A request with a grammar is inserted by age, since it may have waited for the grammar to be compiled.
        """
        self.fair_shares.open(request)
        join = self.waiting.append if request.grammar_state is None else self.waiting.put_back
        if self.speculator is not None:
            self.speculator.open(request)
        join(Pending(request, deque(request.samples), request.prompt))

    def withdraw(self, rids: set[int]) -> None:
        """Remove the waiting samples of these requests from the queue."""
        self.waiting.remove(rids)

    def step_returned(self, step: int) -> None:
        """Take note that the tokens of this step are back."""
        self.microbatches.returned = step

    def next_step(self, *, depth: int = 1) -> StepInput | None:
        """Return the next step, or None if nothing can be computed now. Lengths and states advance at once.

        depth  longest chain of steps in flight in which each step feeds tokens that the one before it samples
        """
        for turn in range(self.microbatches.count):
            if self.microbatches.waits(depth):
                return None
            step = self._next_turn(first=turn == 0)
            self.microbatches.next_turn()
            if step is not None:
                return step
        # No sequence runs that could finish and free pages, so retained prompts block the waiting samples: evict one.
        idle = ((self.table.state == State.FREE) | (self.table.state == State.PREFILL)).all()
        return self.next_step(depth=depth) if idle and self.retained_prompts.drop_lowest_ranked() else None

    def _next_turn(self, *, first: bool) -> StepInput | None:
        """Return the step of the microbatch whose turn it is, or None if nothing can be computed in it.

        `first`: this is the first turn that this call of `next_step` tries. Samples are admitted in it alone.
        """
        table, shortages = self.table, self.reclaimer.shortages
        self.microbatches.balance()
        if first and self.waiting:
            self.reclaimer.preempt_for_slots(self.fair_shares.check(self.computed_tokens))
        decode = self._grow_decoders()
        epoch = table.epoch[decode]
        builder = BatchBuilder(table, self.info.eos_token_ids, self.grammars, self.faults, self.steps + 1)
        budget, rows_to_skip = self._fill_step(builder, decode, shortages, first=first)
        decode = decode[(table.state[decode] == State.DECODE) & (table.epoch[decode] == epoch)]
        if (over := min(rows_to_skip, len(decode) + builder.tokens - self.token_budget.tokens)) > 0:
            decode = self._without(decode, over)
        if self.speculator is not None:
            self._add_drafts(self.speculator, builder, decode)
        decode = np.concatenate((decode, *builder.starts)) if builder.starts else decode
        if not len(decode) and not builder.chunks:
            return None
        self.token_budget.observe(exhausted=budget == 0)
        return self._build(builder, decode)

    def _fill_step(self, builder: BatchBuilder, decode: Int64, shortages: int, *, first: bool) -> tuple[int, int]:
        """Add prefill chunks and new samples to the step, in order of class.

        Return the token budget left, and how many rows of `decode` have to skip this step. `shortages`: those before
        this step; if sequences of this step were preempted for lack of pages, no sample starts.
        """
        table, admitter = self.table, self.admitter
        budget = max(0, self.token_budget.tokens - len(decode))
        prefilling = self.prefill.slots()
        owners = table.epoch[prefilling]
        admitting = first and bool(self.waiting)
        if first:
            self.reclaimer.settle()
            if admitting and table.free_slots:
                self.admission.refresh()
        waiting_class = self.waiting.min_waiting_priority if admitting else None  # highest class not admitted yet
        if (
            waiting_class is not None
            and self.fair_shares.overdue
            and len(prefilling)
            and waiting_class <= table.priority[prefilling[0]]
        ):
            budget = admitter.admit_overdue(builder, decode, budget)  # otherwise long prompts would fill every step
        for slot, owner in zip(prefilling.tolist(), owners.tolist(), strict=True):
            if waiting_class is not None and waiting_class < table.priority[slot]:
                waiting_class, budget = None, admitter.admit_above(builder, decode, budget, table.priority[slot])
            if table.state[slot] == State.PREFILL and table.epoch[slot] == owner:
                try:
                    room = budget + self.prefill.displaceable_rows(slot, decode, budget)
                    budget -= self.prefill.schedule(builder, slot, room, preempting=True) if room > 0 else 0
                except Exception as error:
                    self.faults.add(int(table.rid[slot]), error)
                    budget = min(budget, 0)  # unknown: the failed prefill may have used some of it
        lowest = None if waiting_class is None else self.accounts.lowest_running()
        if waiting_class is not None and lowest is not None and waiting_class < lowest:
            budget = admitter.admit_above(builder, decode, budget, lowest)
        if admitting and (shortages == self.reclaimer.shortages or self.fair_shares.overdue):
            budget = admitter.admit(builder, decode, budget, self.computed_tokens)
        return max(budget, 0), max(-budget, 0)

    def _add_drafts(self, speculator: Speculation, builder: BatchBuilder, decode: Int64) -> None:
        """Lend slots to the draft rows of the step; let the worker move on past accepted drafts."""
        builder.predicted_tokens = speculator.predicted_tokens if len(decode) <= MAX_DRAFTING else 0
        lent = speculator.lend_rows(builder.step, decode, builder.tokens, self.token_budget.tokens)
        builder.lent = lent
        if lent.verify_rows is None:
            moved = decode[self.table.moved[decode]]
            builder.move(moved, moved)
            builder.move(lent.slots, lent.sources)

    def _build(self, builder: BatchBuilder, decode: Int64) -> StepInput:
        """Group the decode rows, add those of drafts, advance each by one position, and return the step."""
        table, groups, lent = self.table, self._find_groups(decode), builder.lent
        if len(lent.slots):
            groups = with_drafts(groups, decode, lent.sources)
            decode = np.concatenate((decode, lent.slots))
        decode = decode[groups.order] if groups.levels else decode
        self.group_rows += groups.rows
        table.length[decode] += 1  # the last token enters the cache, and the next one is sampled
        table.state[decode[table.length[decode] + 1 >= table.limit[decode]]] = State.DRAIN
        self.computed_tokens += len(decode) + sum(count for _, _, count in builder.chunks)
        self.steps += 1
        changes = Changes(*self.paging.take_changes(), *self.paging.copies.take())
        step = builder.build(self.microbatches.step(self.steps, decode), decode, groups, changes)
        self.microbatches.record_sampled(self.steps, step.sample_slot)
        if len(step.mask_row):
            masked = step.sample_slot[step.mask_row]
            table.held[masked[table.guided[masked]]] = True
        return step

    def _grow_decoders(self) -> Int64:
        """Allocate a page for each decoding slot of this turn whose last page is full.

        If pages are short, evict cached pages, then let sequences wait whose drafts in flight may fill their last page,
        then evict retained prompts, then preempt sequences, these slots included. Return the decoding slots of this
        turn that have space in the cache for their next token.
        """
        table, short = self.table, False
        while True:
            slots = self.microbatches.rows()
            space = table.num_pages[slots] * table.page_size - table.length[slots]
            if short:
                slots, space = (column[(space == 0) | (space > table.ahead[slots])] for column in (slots, space))
            full = space <= table.ahead[slots]
            count = int(np.count_nonzero(full))
            if not count:
                return slots
            if self.reclaimer.free_pages(count):
                self.paging.grow(slots[full], self.paging.allocator.allocate(count))
                return slots
            if not short and table.ahead[slots[full]].any():
                short = True
                continue
            if self.retained_prompts.drop_lowest_ranked():
                continue
            running = table.active()
            if len(running) == 1:  # the other pages belong to sequences in DRAIN, whose last tokens are in flight
                return np.compress(~full, slots)
            self.reclaimer.preempt_one_for_pages(running)

    def _without(self, decode: Int64, count: int) -> Int64:
        """Return `decode` without the `count` rows of lowest rank: by class, then overdue slots first, then by age."""
        table = self.table
        ranked = np.lexsort((table.order[decode], ~table.started_overdue[decode], table.priority[decode]))
        rows: Int64 = np.sort(decode[ranked[: max(0, len(decode) - count)]])
        return rows

    def _find_groups(self, decode: Int64) -> Groups:
        """Return the prefix groups of decode rows; fewer than two rows have none."""
        if not self.groupings or len(decode) < 2:
            return NO_GROUPS
        table = self.table
        grouping = self.groupings[self.microbatches.turn]
        sitting_out = self.microbatches.sitting_out(decode)
        around = np.array((sitting_out, table.node[sitting_out], table.epoch[sitting_out]), np.int64)
        return grouping.groups_of(decode, table.node[decode], table.epoch[decode], around)
