"""Choose the tokens that the next step computes, without waiting for the values that earlier steps return."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from tok_core.config import AdmissionName
from tok_core.manager.admission import Admitter, FairShares, LengthModel, SequenceStarter, make_admission
from tok_core.manager.batch import BatchBuilder, Changes, Microbatches, TokenBudget
from tok_core.manager.faults import Faults
from tok_core.manager.grammar import GrammarManager
from tok_core.manager.kv_cache import LeastWorkLost, Paging
from tok_core.manager.prefix_groups import Grouping, Groups, MostPagesSaved
from tok_core.manager.sequences import Pending, Request, SequenceTable, State
from tok_core.manager.stops import StopSets
from tok_core.messages import EngineInfo, Int64, StepInput

NO_GROUPS = Groups(np.empty(0, np.int64), [], 0)


class Scheduler:
    """Step scheduler: decode rows first, then prefill chunks in order of arrival, then new samples as memory allows.

    Requests of a lower `priority` value come first. If slots, pages or tokens of the step run short, lower classes
    (those of higher values) are preempted or wait. Within a class, `FairShares` chooses whose samples start next. When
    pages run out, cached pages are evicted first, then retained prompts; then sequences are preempted
    (`PreemptionPolicy`). A preempted sequence keeps its tokens, waits at its old place in the queue, and prefills again
    what is no longer cached.
    """

    def __init__(
        self,
        info: EngineInfo,
        table: SequenceTable,
        paging: Paging,
        lengths: LengthModel,
        stops: StopSets,
        grammars: GrammarManager,
        *,
        groups: bool,
        admission: AdmissionName = "forecast",
        stages: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.table = table
        self.paging = paging
        self.grammars = grammars
        self.starter = SequenceStarter(table, paging, stops, lengths.prompt_stats)
        self.retained_prompts = self.starter.retained_prompts
        self.waiting = self.starter.waiting
        self.pending_forks = self.starter.pending_forks
        self.preemption = LeastWorkLost(paging)
        self.fair_shares = FairShares(table, paging, self.waiting, self.preemption, clock)
        self.admission = make_admission(admission, table, paging, lengths, self.retained_prompts)
        self.microbatches = Microbatches(table, stages)
        self.admitter = Admitter(self)
        self.token_budget = TokenBudget(info.max_step_tokens, self.microbatches.count)
        self.groupings = (
            [Grouping(paging.tree, MostPagesSaved()) for _ in range(self.microbatches.count)] if groups else []
        )  # one per microbatch
        self.faults = Faults()
        self._ended: list[Int64] = []  # slots whose sequences have ended but that still hold pages
        self.preemptions = 0
        self._shortages = 0  # preemptions for lack of pages
        self.computed_tokens = 0
        self.group_rows = 0
        self.steps = 0

    def submit(self, request: Request) -> None:
        """Add a new request to the queue.

        A request with a grammar is inserted by age, since it may have waited for the grammar to be compiled.
        """
        self.fair_shares.open(request)
        join = self.waiting.append if request.grammar_state is None else self.waiting.put_back
        join(Pending(request, deque(request.samples), request.prompt))

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
        return self.next_step(depth=depth) if idle and self.retained_prompts.drop_youngest() else None

    def _next_turn(self, *, first: bool) -> StepInput | None:
        """Return the step of the microbatch whose turn it is, or None if nothing can be computed in it.

        `first`: this is the first turn that this call of `next_step` tries. Samples are admitted in it alone.
        """
        self.microbatches.balance()
        builder = BatchBuilder(self.table, self.info.eos_token_ids, self.grammars, self.faults)
        shortages = self._shortages
        if first and self.waiting:
            self.preempt_for_slots(self.fair_shares.look(self.computed_tokens))
        decode = self._grow_decoders()
        epoch = self.table.epoch[decode]
        budget = max(0, self.token_budget.tokens - len(decode))
        prefilling = self._prefilling()
        owners = self.table.epoch[prefilling]
        admitting = first and bool(self.waiting)
        if first:
            self.settle()
            if admitting and self.table.free_slots:
                self.admission.refresh()
        above = self.waiting.min_open_priority if admitting else None
        if (
            above is not None
            and self.fair_shares.due
            and len(prefilling)
            and above <= self.table.priority[prefilling[0]]
        ):
            budget = self.admitter.admit_due(builder, decode, budget)  # otherwise long prompts would fill every step
        for slot, owner in zip(prefilling.tolist(), owners.tolist(), strict=True):
            if above is not None and above < self.table.priority[slot]:
                above, budget = None, self.admitter.admit_above(builder, decode, budget, self.table.priority[slot])
            if self.table.state[slot] == State.PREFILL and self.table.epoch[slot] == owner:
                try:
                    room = budget + self._rows_behind(slot, decode, budget)
                    budget -= self.prefill(builder, slot, room, preempting=True) if room > 0 else 0
                except Exception as error:
                    self.faults.add(int(self.table.rid[slot]), error)
                    budget = min(budget, 0)  # unknown: the failed prefill may have used some of it
        if above is not None and (lowest := self.fair_shares.accounts.lowest_running()) is not None and above < lowest:
            budget = self.admitter.admit_above(builder, decode, budget, lowest)
        if admitting and (shortages == self._shortages or self.fair_shares.due):
            budget = self.admitter.admit(builder, decode, budget)
        decode = decode[(self.table.state[decode] == State.DECODE) & (self.table.epoch[decode] == epoch)]
        if (over := min(-budget, len(decode) + builder.tokens - self.token_budget.tokens)) > 0:
            decode = self._without(decode, over)
        decode = np.concatenate((decode, *builder.starts)) if builder.starts else decode
        if not len(decode) and not builder.chunks:
            return None
        self.token_budget.observe(exhausted=budget <= 0)
        groups = self._find_groups(decode)
        decode = decode[groups.order] if len(groups.order) else decode
        self._advance(decode)
        self.computed_tokens += len(decode) + sum(count for _, _, count in builder.chunks)
        self.steps += 1
        changes = Changes(*self.paging.take_changes(), *self.paging.copies.take())
        step = builder.build(self.steps, self.microbatches.step(self.steps, decode), decode, groups, changes)
        self.microbatches.record_sampled(self.steps, step.sample_slot)
        if len(step.mask_row):
            self.table.held[step.sample_slot[step.mask_row]] = True
        return step

    def preempt(self, slot: int) -> None:
        """Preempt a sequence for lack of pages. It is requeued at once, or when its last scheduled token is back."""
        self._shortages += 1
        request = self.table.requests[slot]
        assert request is not None
        request.preempted.add(int(self.table.sample[slot]))
        self._vacate(slot)

    def preempt_for_slots(self, slots: Iterable[int]) -> None:
        """Preempt sequences whose slots other samples are to get."""
        for slot in slots:
            request = self.table.requests[slot]
            assert request is not None
            request.displaced.add(int(self.table.sample[slot]))
            self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        self.preemptions += 1
        table = self.table
        known = table.known[slot] > table.length[slot] and not table.held[slot]  # held: its grammar may append tokens
        complete = table.state[slot] == State.PREFILL or known
        self.paging.release_all_pages(np.array([slot]))
        self.table.state[slot] = State.PREEMPTED
        if complete:
            self.requeue(slot)

    def requeue(self, slot: int) -> None:
        """Put a preempted sequence, all of whose tokens are known, back into the queue."""
        rid = int(self.table.rid[slot])
        try:
            self.starter.requeue(slot)
        except Exception as error:
            self.faults.add(rid, error)

    def release(self, slots: Int64) -> None:
        """Mark sequences as ended, whether finished or cancelled. They hold slots and pages until `settle`.

        Preempted sequences hold no pages; their slots are freed at once.
        """
        for slot in slots.tolist() if self.pending_forks else ():
            request, forks = self.table.requests[slot], self.pending_forks.pop(slot, None)
            if forks is not None and request is not None:
                request.hold(-len(forks))
        for slot in slots.tolist() if self.table.matchers else ():
            if (matcher := self.table.matchers.pop(slot, None)) is not None:
                self.grammars.end(matcher)
        if not len(slots):
            return
        holding = self.table.state[slots] != State.PREEMPTED
        self.table.free(slots[~holding])
        self.table.end(slots[holding])
        self._ended.append(slots[holding])

    def settle(self) -> None:
        """Free the slots and pages of ended sequences; full pages stay cached."""
        if self._ended:
            slots, self._ended = np.concatenate(self._ended), []
            self.paging.release_all_pages(slots)
            self.table.free(slots)

    def resume_held(self, slots: Int64) -> None:
        """Let held sequences sample again; they prefill first if more than their last token is not in the cache."""
        table = self.table
        table.held[slots] = False
        behind = slots[(table.state[slots] == State.DECODE) & (table.known[slots] > table.length[slots] + 1)]
        table.target[behind] = table.known[behind]
        table.state[behind] = State.PREFILL

    def close(self, request: Request) -> None:
        """Remove the request, whose samples have all ended, from its caller's account."""
        self.fair_shares.accounts.close(request)

    def cancel(self, request: Request) -> None:
        """Release the slots, pages and retained prompt of the request. Its waiting samples stay in the queue."""
        self.close(request)
        self.release(np.array(list(request.slots.values()), np.int64))
        self.retained_prompts.drop(request.rid)

    def room_for(self, count: int) -> bool:
        """Make `count` pages free if possible, and return whether they are.

        Pages of ended sequences are taken before cached pages are evicted.
        """
        if count > self.paging.allocator.free:
            self.settle()
        return self.paging.room_for(count)

    def running(self) -> Int64:
        """Return the slots that may be preempted."""
        return np.concatenate((self.table.in_state(State.PREFILL), self.table.in_state(State.DECODE)))

    def _prefilling(self) -> Int64:
        """Return the prefilling slots: higher classes first; within a class, granted slots first, then by arrival."""
        table, slots = self.table, self.table.in_state(State.PREFILL)
        in_order: Int64 = slots[np.lexsort((table.order[slots], ~table.granted[slots], table.priority[slots]))]
        return in_order

    def _grow_decoders(self) -> Int64:
        """Allocate a page for each decoding slot of this turn whose last page is full, preempting others if needed.

        Return the decoding slots of this turn that have space in the cache for their next token.
        """
        table = self.table
        while True:
            slots = self.microbatches.rows()
            full = table.length[slots] == table.num_pages[slots] * table.page_size
            count = int(np.count_nonzero(full))
            if not count:
                return slots
            if self.room_for(count):
                self.paging.grow(slots[full], self.paging.allocator.allocate(count))
                return slots
            if self.retained_prompts.drop_youngest():
                continue
            running = self.running()
            if len(running) == 1:  # the other pages belong to sequences in DRAIN, whose last tokens are in flight
                return np.compress(~full, slots)
            self.preempt(self.preemption.choose(running))

    def _make_room(self, builder: BatchBuilder, count: int, slot: int) -> bool:
        """Make `count` pages free for `slot`, preempting sequences of lower rank if needed; return whether they are."""
        while not self.room_for(count):
            if self.retained_prompts.drop_youngest():
                continue
            running = self.running()
            priority, order = self.table.priority[running], self.table.order[running]
            same, younger = priority == self.table.priority[slot], order > self.table.order[slot]
            spared = self.table.granted[running]
            same &= (~spared | younger) if self.table.granted[slot] else (~spared & younger)
            later = running[same | (priority > self.table.priority[slot])]
            later = later[~np.isin(later, builder.busy)]
            if not len(later):
                return False
            self.preempt(self.preemption.choose(later))
        return True

    def prefill(self, builder: BatchBuilder, slot: int, budget: int, *, preempting: bool) -> int:
        """Schedule the next prefill chunk of `slot`; return its number of tokens, 0 if there are no pages for it.

        `preempting`: whether sequences of lower rank may be preempted for these pages.
        """
        table = self.table
        if preempting:  # otherwise `SequenceStarter.lead` has just done so
            self.starter.adopt(slot)
        start = int(table.length[slot])
        count = min(budget, int(table.target[slot]) - start)
        missing = self.paging.missing(slot, start + count)
        if not (self._make_room(builder, missing, slot) if preempting else self.room_for(missing)):
            return 0
        self.paging.reserve(slot, start + count)
        builder.chunk(slot, start, count)
        table.length[slot] = start + count
        self.paging.publish(slot)
        if start + count == table.target[slot]:
            forks = self.starter.finish_prefill(slot, self.steps + 1)
            builder.add_sampling(slot, forks)
            # Forks have the same length and limit as their leader.
            state = State.DRAIN if table.length[slot] + 1 >= table.limit[slot] else State.DECODE
            table.state[slot] = state
            if len(forks):
                table.state[forks] = state
        return count

    def _rows_behind(self, slot: int, decode: Int64, budget: int) -> int:
        """Return how many rows of `decode` may skip this step so that `slot` can prefill."""
        table = self.table
        if budget >= table.target[slot] - table.length[slot]:
            return 0
        behind = table.priority[decode] > table.priority[slot]
        if table.granted[slot]:
            behind |= (table.priority[decode] == table.priority[slot]) & ~table.granted[decode]
        return int(np.count_nonzero(behind & (table.state[decode] == State.DECODE)))

    def _without(self, decode: Int64, count: int) -> Int64:
        """Return `decode` without the `count` rows of lowest rank: by class, then granted slots first, then by age."""
        table = self.table
        ranked = np.lexsort((table.order[decode], ~table.granted[decode], table.priority[decode]))
        rows: Int64 = np.sort(decode[ranked[: max(0, len(decode) - count)]])
        return rows

    def _find_groups(self, decode: Int64) -> Groups:
        """Return the groups that save the most page reads; fewer than two rows have none."""
        if not self.groupings or len(decode) < 2:
            return NO_GROUPS
        table = self.table
        grouping = self.groupings[self.microbatches.turn]
        sitting_out = self.microbatches.sitting_out(decode)
        around = np.array((sitting_out, table.node[sitting_out], table.epoch[sitting_out]), np.int64)
        groups = grouping.find(decode, table.node[decode], table.epoch[decode], around)
        self.group_rows += groups.rows
        return groups

    def _advance(self, decode: Int64) -> None:
        """Advance each decode row by one position: its last token enters the cache, and the next one is sampled."""
        self.table.length[decode] += 1
        self._drain(decode)

    def _drain(self, slots: Int64) -> None:
        """Set slots to DRAIN that have just sampled the last token that their limit allows."""
        self.table.state[slots[self.table.length[slots] + 1 >= self.table.limit[slots]]] = State.DRAIN
