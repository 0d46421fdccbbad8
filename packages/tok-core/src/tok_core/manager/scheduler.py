"""Scheduler: which tokens the next step computes. It never waits for the values of the steps before."""

from __future__ import annotations

from collections import deque

import numpy as np

from tok_core.manager.admission import Admission
from tok_core.manager.grouping import Groups, find_groups
from tok_core.manager.paging import Paging
from tok_core.manager.queue import WaitingQueue
from tok_core.manager.sequences import Pending, Request, SequenceTable, State
from tok_core.manager.step import StepBuilder
from tok_core.manager.stops import StopSets
from tok_core.messages import EMPTY, EngineInfo, Int64, StepInput

NO_GROUPS = Groups(np.empty(0, np.int64), EMPTY, EMPTY, EMPTY, EMPTY)


class Scheduler:
    """Decode rows first, then chunks of prompts in order of arrival, then as many new samples as memory will bear.

    When pages run out, what is only cached goes first, then the youngest sequences are preempted: they keep their
    tokens, wait at their old place in the queue, and prefill again what is not cached any more.
    """

    def __init__(
        self,
        info: EngineInfo,
        table: SequenceTable,
        paging: Paging,
        admission: Admission,
        stops: StopSets,
        *,
        groups: bool,
    ) -> None:
        self.info = info
        self.table = table
        self.paging = paging
        self.admission = admission
        self.stops = stops
        self.groups = groups
        self.waiting = WaitingQueue()
        self.followers: dict[int, deque[int]] = {}  # leader's slot: samples that will fork from it
        self.newly_cached: list[tuple[int, int]] = []  # request, prompt tokens found in the cache
        self.preemptions = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.group_rows = 0
        self.steps = 0

    def submit(self, request: Request) -> None:
        """A new request joins the queue."""
        self.waiting.append(Pending(request, deque(range(request.params.n)), request.prompt))

    def next_step(self) -> StepInput | None:
        """The next step, or None where nothing can be computed now. Lengths and states move on at once."""
        builder = StepBuilder(self.table, self.info.eos_token_ids)
        preempted = self.preemptions
        self._grow_decoders()
        decode = self._decoders()
        epoch = self.table.epoch[decode]
        budget = self.info.max_step_tokens - len(decode)
        for slot in self._by_age(State.PREFILL):
            if budget and self.table.state[slot] == State.PREFILL:
                budget -= self._prefill(builder, int(slot), budget, preempting=True)
        if preempted == self.preemptions:
            self._admit(builder, budget)
        decode = decode[(self.table.state[decode] == State.DECODE) & (self.table.epoch[decode] == epoch)]
        if not len(decode) and not builder.chunks:
            return None
        groups = self._find_groups(decode)
        decode = decode[groups.order] if len(groups.order) else decode
        self._advance(decode)
        self.computed_tokens += len(decode) + sum(count for _, _, count in builder.chunks)
        self.steps += 1
        return builder.build(self.steps, decode, groups, self.paging.take_changes())

    def preempt(self, slot: int) -> None:
        """The sequence gives up its pages. It waits again at once, or when its last scheduled token is back."""
        self.preemptions += 1
        complete = self.table.state[slot] == State.PREFILL or self.table.known[slot] > self.table.length[slot]
        self.paging.surrender(slot)
        self.table.state[slot] = State.PREEMPTED
        if complete:
            self.requeue(slot)

    def requeue(self, slot: int) -> None:
        """A preempted sequence, all of whose tokens are known, goes back to its place in the queue."""
        request = self.table.requests[slot]
        assert request is not None
        samples = deque([int(self.table.sample[slot])])
        samples += self.followers.pop(slot, deque())
        tokens = self.table.tokens[slot, : self.table.known[slot]].copy()
        self.table.free(slot)
        self.waiting.put_back(Pending(request, samples, tokens))

    def release(self, slot: int) -> None:
        """The sequence has ended, or is not wanted any more."""
        if self.table.state[slot] != State.PREEMPTED:
            self.paging.surrender(slot)
        self.followers.pop(slot, None)
        self.table.free(slot)

    def _decoders(self) -> Int64:
        """Decoding slots whose next token has a place in the cache."""
        slots, table = self.table.in_state(State.DECODE), self.table
        return slots[table.length[slots] < table.num_pages[slots] * table.page_size]

    def _by_age(self, *states: State) -> Int64:
        slots = np.flatnonzero(np.isin(self.table.state, states))
        return slots[np.argsort(self.table.order[slots])]

    def _grow_decoders(self) -> None:
        """Gives a page to each decoder that has filled its last one; makes room by preempting the youngest."""
        table = self.table
        while True:
            slots = table.in_state(State.DECODE)
            full = slots[table.length[slots] == table.num_pages[slots] * table.page_size]
            if self.paging.room_for(len(full)):
                self.paging.grow(full)
                return
            running = self._by_age(State.PREFILL, State.DECODE)
            if len(running) == 1:  # sequences about to end still hold pages: their tokens are on the way
                return
            self.preempt(int(running[-1]))

    def _make_room(self, count: int, slot: int) -> bool:
        """Room for `count` pages of `slot`, preempting sequences younger than it where that is needed."""
        while not self.paging.room_for(count):
            youngest = int(self._by_age(State.PREFILL, State.DECODE)[-1])
            if youngest == slot:
                return False
            self.preempt(youngest)
        return True

    def _prefill(self, builder: StepBuilder, slot: int, budget: int, *, preempting: bool) -> int:
        """Schedules the next chunk of `slot`; returns its number of tokens, 0 where there is no room for it."""
        table = self.table
        self.paging.adopt(slot)
        start = int(table.length[slot])
        count = min(budget, int(table.target[slot]) - start)
        missing = self.paging.missing(slot, start + count)
        if not (self._make_room(missing, slot) if preempting else self.paging.room_for(missing)):
            return 0
        self.paging.reserve(slot, start + count)
        builder.chunk(slot, start, count)
        table.length[slot] = start + count
        self.paging.publish(slot)
        if start + count == table.target[slot]:
            self._finish_prefill(builder, slot)
        return count

    def _finish_prefill(self, builder: StepBuilder, slot: int) -> None:
        """The leader draws its first token, and the other samples theirs from the same logits."""
        builder.draw(slot)
        self._after_draw(slot)
        samples = self.followers.pop(slot, deque())
        request, cost = self.table.requests[slot], self.paging.fork_cost(slot)
        assert request is not None
        while samples and self.table.free_slots and self.paging.room_for(cost):
            fork = self.table.claim(request, samples.popleft(), request.prompt)
            builder.copies.append(self.paging.fork(slot, fork))
            self.table.length[fork] = self.table.length[slot]
            builder.draw(fork)
            self._after_draw(fork)
        if samples:
            self.waiting.put_back(Pending(request, samples, request.prompt))

    def _after_draw(self, slots: int | Int64) -> None:
        table = self.table
        more = table.length[slots] + 1 < table.limit[slots]
        table.state[slots] = np.where(more, State.DECODE, State.DRAIN)

    def _admit(self, builder: StepBuilder, budget: int) -> None:
        """Starts waiting samples in their order while budget, slots and the forecast allow."""
        if budget <= 0:
            return
        allowed = self.admission.count(self.waiting, {s: len(f) for s, f in self.followers.items()})
        while allowed and budget and self.waiting:
            slot = self._start(self.waiting.pop(), allowed)
            allowed -= 1 + len(self.followers.get(slot, ()))
            # A sample that returns may be older than others of this step: it must not preempt them now.
            count = self._prefill(builder, slot, budget, preempting=False)
            if not count:
                return
            budget -= count

    def _start(self, pending: Pending, allowed: int) -> int:
        """Gives a slot to the first sample of `pending`; up to `allowed − 1` others are reserved to fork from it."""
        samples, request = pending.samples, pending.request
        if request.stop_set is None:
            request.stop_set = self.stops.acquire(request.params)
        slot = self.table.claim(request, samples.popleft(), pending.tokens)
        self.paging.start(slot)
        self.paging.adopt(slot)
        self._report_cached(request, int(self.table.length[slot]))
        if len(samples) < allowed:
            later, samples = samples, deque[int]()
        else:
            later = deque(samples.popleft() for _ in range(allowed - 1))
        if later:
            self.followers[slot] = later
        if samples:
            self.waiting.put_back(Pending(request, samples, request.prompt))
        return slot

    def _report_cached(self, request: Request, cached: int) -> None:
        if not request.reported:
            request.reported = True
            self.cached_tokens += cached
            self.newly_cached.append((request.rid, cached))

    def _find_groups(self, decode: Int64) -> Groups:
        if not self.groups or len(decode) < 2:
            return NO_GROUPS
        table = self.table
        groups = find_groups(
            self.paging.tree,
            table.node[decode],
            decode.astype(np.int32),
            table.length[decode],
        )
        self.group_rows += int(groups.row_count.sum())
        return groups

    def _advance(self, decode: Int64) -> None:
        """Each decoder's last token will be in the cache, and the next one drawn."""
        self.table.length[decode] += 1
        self._after_draw(decode)
