"""Scheduler: which tokens the next step computes. It never waits for the values of the steps before."""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np

from tok_core.manager.admission import Admission
from tok_core.manager.cohorts import Cohorts
from tok_core.manager.deferral import Deferral
from tok_core.manager.evenness import Evenness
from tok_core.manager.grouping import Grouping, Groups
from tok_core.manager.guides import Guides
from tok_core.manager.lengths import LengthModel
from tok_core.manager.paging import Paging
from tok_core.manager.sequences import Pending, Request, SequenceTable, State
from tok_core.manager.starts import Starts
from tok_core.manager.step import Changes, StepBuilder
from tok_core.manager.stops import StopSets
from tok_core.manager.victims import choose_victim
from tok_core.messages import EngineInfo, Int64, StepInput

NO_GROUPS = Groups(np.empty(0, np.int64), [], 0)


class Scheduler:
    """Decode rows first, then chunks of prompts in order of arrival, then as many new samples as memory will bear.

    Requests of a lower `priority` come first in all of this. When pages run out, what is only cached goes first, then
    prompts kept for samples that have not started, then sequences are preempted (`choose_victim`): they keep their
    tokens, wait at their old place in the queue, and prefill again what is not cached any more.
    """

    def __init__(
        self,
        info: EngineInfo,
        table: SequenceTable,
        paging: Paging,
        lengths: LengthModel,
        stops: StopSets,
        guides: Guides,
        *,
        groups: bool,
        stages: int = 1,
    ) -> None:
        self.info = info
        self.table = table
        self.paging = paging
        self.guides = guides
        self.starts = Starts(table, paging, stops, lengths.families)
        self.stems = self.starts.stems
        self.waiting = self.starts.waiting
        self.followers = self.starts.followers
        self.admission = Admission(table, paging, lengths, self.stems)
        self.cohorts = Cohorts(table, stages)
        self.evenness = Evenness(info.max_step_tokens, self.cohorts.count)
        self.groupings = [Grouping(paging.tree) for _ in range(self.cohorts.count)] if groups else []  # a cohort each
        self.deferral = Deferral()
        self._ended: list[Int64] = []  # slots whose sequences have ended, and that hold pages
        self.preemptions = 0
        self.computed_tokens = 0
        self.group_rows = 0
        self.steps = 0

    def submit(self, request: Request) -> None:
        """A new request joins the queue; one with a grammar may have waited for that, and takes its place by age."""
        join = self.waiting.append if request.guide is None else self.waiting.put_back
        join(Pending(request, deque(request.samples), request.prompt))

    def next_step(self, *, hurried: bool = False, depth: int = 1) -> StepInput | None:
        """The next step, or None where nothing can be computed now. Lengths and states move on at once.

        hurried  the worker runs dry soon, so that what can wait does
        depth    steps under way that may wait for each other's draws, one for the one before it
        """
        for turn in range(self.cohorts.count):
            if self.cohorts.waits(depth):
                return None
            step = self._next_turn(hurried=hurried, first=turn == 0)
            self.cohorts.next_turn()
            if step is not None:
                return step
        # Where nobody runs who could end, what is kept for others is in the way of those that wait.
        idle = ((self.table.state == State.FREE) | (self.table.state == State.PREFILL)).all()
        return self.next_step(depth=depth) if idle and self.stems.drop_youngest() else None

    def _next_turn(self, *, hurried: bool, first: bool) -> StepInput | None:
        """The step of the cohort whose turn it is, or None where nothing can be computed in it.

        `first`: no other turn has just found nothing that could start.
        """
        self.cohorts.balance()
        builder = StepBuilder(self.table, self.info.eos_token_ids, self.guides)
        preempted = self.preemptions
        decode = self._grow_decoders()
        epoch = self.table.epoch[decode]
        budget = max(0, self.evenness.tokens - len(decode))
        prefilling = self._prefilling()
        admitting = first and self._catch_up(len(prefilling), hurried=hurried, running=len(decode))
        for slot in prefilling:
            if budget and self.table.state[slot] == State.PREFILL:
                budget -= self._prefill(builder, int(slot), budget, preempting=True)
        if admitting and preempted == self.preemptions:
            budget = self._admit(builder, budget)
        decode = decode[(self.table.state[decode] == State.DECODE) & (self.table.epoch[decode] == epoch)]
        decode = np.concatenate((decode, *builder.starts)) if builder.starts else decode
        if not len(decode) and not builder.chunks:
            return None
        self.evenness.observe(exhausted=not budget)
        groups = self._find_groups(decode, hurried=hurried)
        decode = decode[groups.order] if len(groups.order) else decode
        self._advance(decode)
        self.computed_tokens += len(decode) + sum(count for _, _, count in builder.chunks)
        self.steps += 1
        changes = Changes(*self.paging.take_changes(), *self.paging.copies.take())
        step = builder.build(self.steps, self.cohorts.step(self.steps, decode), decode, groups, changes)
        self.cohorts.drew(self.steps, step.sample_slot)
        if len(step.mask_row):
            self.table.held[step.sample_slot[step.mask_row]] = True
        return step

    def preempt(self, slot: int) -> None:
        """The sequence gives up its pages. It waits again at once, or when its last scheduled token is back."""
        self.preemptions += 1
        request = self.table.requests[slot]
        assert request is not None
        request.preempted.add(int(self.table.sample[slot]))
        complete = self.table.state[slot] == State.PREFILL or self.table.known[slot] > self.table.length[slot]
        self.paging.surrender(np.array([slot]))
        self.table.state[slot] = State.PREEMPTED
        if complete:
            self.starts.requeue(slot)

    def release(self, slots: Int64) -> None:
        """The sequences have ended, or are not wanted any more. They hold slots and pages until `settle`."""
        for slot in slots.tolist() if self.followers else ():
            self.followers.pop(slot, None)
        if not len(slots):
            return
        holding = self.table.state[slots] != State.PREEMPTED
        self.table.free(slots[~holding])
        self.table.end(slots[holding])
        self._ended.append(slots[holding])
        self.deferral.concern(len(slots), "admission", "forecast", "cache", "statistics")

    def settle(self) -> None:
        """Sequences that have ended give up their slots and pages; full pages stay cached."""
        self.deferral.done("cache")
        if self._ended:
            slots, self._ended = np.concatenate(self._ended), []
            self.paging.surrender(slots)
            self.table.free(slots)

    def go_on(self, slots: Int64) -> None:
        """Sequences that were held draw again, after a prefill where more than their last token is not in the cache."""
        table = self.table
        table.held[slots] = False
        behind = slots[(table.state[slots] == State.DECODE) & (table.known[slots] > table.length[slots] + 1)]
        table.target[behind] = table.known[behind]
        table.state[behind] = State.PREFILL

    def cancel(self, request: Request) -> None:
        """Gives up all that the request holds; samples of it that wait stay in the queue."""
        self.release(np.array(list(request.slots.values()), np.int64))
        self.stems.drop(request.rid)

    def _catch_up(self, prefilling: int, *, hurried: bool, running: int) -> bool:
        """Settles unless that can wait; returns whether samples are to be started, and then has settled."""
        if self.waiting and not (running and self.deferral.puts_off("admission", hurried=hurried, running=running)):
            self.settle()
            if self.table.free_slots and not self.deferral.puts_off("forecast", hurried=hurried, running=running):
                self.admission.refresh()
            return True
        # Who prefills or forks takes pages and looks for cached ones.
        if self.table.ended and (prefilling or not self.deferral.puts_off("cache", hurried=hurried, running=running)):
            self.settle()
        return False

    def _room_for(self, count: int) -> bool:
        """Whether `count` pages are free. Nothing cached is given up for them as long as ended sequences hold some."""
        if count > self.paging.allocator.free:
            self.settle()
        return self.paging.room_for(count)

    def _running(self) -> Int64:
        return np.concatenate((self.table.in_state(State.PREFILL), self.table.in_state(State.DECODE)))

    def _prefilling(self) -> Int64:
        """Slots that prefill, higher classes first and within a class in order of arrival."""
        slots = self.table.in_state(State.PREFILL)
        in_order: Int64 = slots[np.lexsort((self.table.order[slots], self.table.priority[slots]))]
        return in_order

    def _grow_decoders(self) -> Int64:
        """Gives a page to each decoder of this turn that has filled its last one; makes room by preempting others.

        Returns the decoding slots of this turn whose next token has a place in the cache.
        """
        table = self.table
        while True:
            slots = self.cohorts.rows()
            full = table.length[slots] == table.num_pages[slots] * table.page_size
            count = int(np.count_nonzero(full))
            if not count:
                return slots
            if self._room_for(count):
                self.paging.grow(slots[full], self.paging.allocator.allocate(count))
                return slots
            if self.stems.drop_youngest():
                continue
            running = self._running()
            if len(running) == 1:  # sequences about to end still hold pages: their tokens are on the way
                return np.compress(~full, slots)
            self.preempt(choose_victim(self.paging, running))

    def _make_room(self, count: int, slot: int) -> bool:
        """Room for `count` pages of `slot`, preempting sequences that come after it where that is needed."""
        while not self._room_for(count):
            if self.stems.drop_youngest():
                continue
            running = self._running()
            priority, order = self.table.priority[running], self.table.order[running]
            same = (priority == self.table.priority[slot]) & (order > self.table.order[slot])
            later = running[same | (priority > self.table.priority[slot])]
            if not len(later):
                return False
            self.preempt(choose_victim(self.paging, later))
        return True

    def _prefill(self, builder: StepBuilder, slot: int, budget: int, *, preempting: bool) -> int:
        """Schedules the next chunk of `slot`; returns its number of tokens, 0 where there is no room for it."""
        table = self.table
        if preempting:  # who has just started has done so
            self.starts.adopt(slot)
        start = int(table.length[slot])
        count = min(budget, int(table.target[slot]) - start)
        missing = self.paging.missing(slot, start + count)
        if not (self._make_room(missing, slot) if preempting else self._room_for(missing)):
            return 0
        self.paging.reserve(slot, start + count)
        builder.chunk(slot, start, count)
        table.length[slot] = start + count
        self.paging.publish(slot)
        if start + count == table.target[slot]:
            forks = self.starts.finish_prefill(slot, self.steps + 1)
            builder.draw(slot, forks)
            # The forks are as long as their leader, and end where it does.
            state = State.DRAIN if table.length[slot] + 1 >= table.limit[slot] else State.DECODE
            table.state[slot] = state
            if len(forks):
                table.state[forks] = state
            self.deferral.concern(1 + len(forks), "regrouping")
        return count

    def _admit(self, builder: StepBuilder, budget: int) -> int:
        """Starts waiting samples in their order while budget, slots and the forecast allow; returns what is left."""
        if budget <= 0 or not self.waiting:
            return budget
        reserved = {slot: len(forks) for slot, forks in self.followers.items()}
        self.admission.account(self.computed_tokens, self.starts.computed_twice)
        allowed = self.admission.count(self.waiting, reserved, self.cohorts.cycles, budget)
        while allowed > 0 and budget > 0 and self.waiting:
            pending = self.waiting.pop()
            stem = self.stems.find(pending.request) if pending.fresh else None
            if stem is not None:
                slots = self.starts.start_late(stem, pending, min(allowed, budget), self.steps + 1)
                if not len(slots):
                    return budget
                builder.start(slots)
                self.deferral.concern(len(slots), "regrouping")
                allowed, budget = allowed - len(slots), budget - len(slots)
            elif pending.fresh and pending.request.leader is not None:
                allowed -= self.starts.follow(pending, allowed)
            else:
                slot, forks = self.starts.lead(pending, allowed)
                # A sample that returns may be older than others of this step: it must not preempt them now.
                count = self._prefill(builder, slot, budget, preempting=False)
                if not count:
                    return budget
                allowed, budget = allowed - 1 - forks, budget - count
        return budget

    def _find_groups(self, decode: Int64, *, hurried: bool) -> Groups:
        """Those that save most reading, or what is left of the last ones; none among fewer than two rows."""
        if not self.groupings or len(decode) < 2:
            return NO_GROUPS
        table, deferral = self.table, self.deferral
        # Of cohorts it might be the same that does without each time.
        hurried = hurried and self.cohorts.count == 1
        puts_off = partial(deferral.puts_off, "regrouping", hurried=hurried, running=len(decode))
        grouping = self.groupings[self.cohorts.turn]
        resting = self.cohorts.resting(decode)
        around = np.array((resting, table.node[resting], table.epoch[resting]), np.int64)
        groups = grouping.find(decode, table.node[decode], table.epoch[decode], puts_off, around)
        self.group_rows += groups.rows
        return groups

    def _advance(self, decode: Int64) -> None:
        """Each decoder's last token will be in the cache, and the next one drawn."""
        self.table.length[decode] += 1
        self._drain(decode)

    def _drain(self, slots: Int64) -> None:
        """Those that have just drawn the last token they may have wait for it."""
        self.table.state[slots[self.table.length[slots] + 1 >= self.table.limit[slots]]] = State.DRAIN
