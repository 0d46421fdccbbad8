"""Start waiting samples: lead a prefill, fork from it, or start late as a decode row; compute the cost of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tok_core.manager.kv_cache import Paging, RetainedPrompt, RetainedPrompts
from tok_core.manager.requests import Pending, Request, WaitingQueue
from tok_core.manager.sequences import NOBODY, State
from tok_core.manager.stops import StopSets
from tok_core.messages import Int64


class Startable(NamedTuple):
    """Slots that waiting samples may take, and the sequences that keep theirs.

    running   slots of running sequences, int64 [n]
    reserved  by slot of a prefilling leader, the number of forks still to come, which count as running
    """

    slots: int
    running: Int64
    reserved: dict[int, int]


class StartCosts(NamedTuple):
    """Pages that the `first` of some samples and each of the `others` shares; tokens that they all compute."""

    first: int
    others: int
    tokens: int


class SequenceStarter:
    """Assignment of slots to waiting samples.

    The first sample of a request leads: it prefills the prompt. Samples that may start before it is done follow: they
    fork from it and sample their first token from the same logits. The others start later as decode rows that feed the
    prompt's last token, from the retained prompt (`RetainedPrompts`). If that was evicted, one of them leads again.

    Followers also start later if their leader has full pages of its own, because it computed tokens that the tree had
    already: a fork copies the last page and no more. If the cache was cleared while the leader prefilled, all others
    start anew, since its first pages may have been computed with older weights.
    """

    def __init__(self, paging: Paging, stops: StopSets, clock: Callable[[], float]) -> None:
        self.table = paging.table
        self.paging = paging
        self.stops = stops
        self.retained_prompts = RetainedPrompts(paging)
        self.waiting = WaitingQueue()
        self.pending_forks: dict[int, deque[int]] = {}  # leader's slot: samples that will fork from it
        self._clock = clock
        self._newly_started: list[tuple[int, int, float]] = []  # request, prompt tokens found in the cache, time
        self.cached_tokens = 0
        self.recomputed_tokens = 0  # tokens of preempted samples that were no longer cached

    @property
    def unreserved_slots(self) -> int:
        """Return the number of free slots, without those that forks to come will take."""
        return self.table.free_slots - sum(map(len, self.pending_forks.values()))

    def startable(self, priority: int | None) -> Startable:
        """Return what may start as far as slots go.

        priority  lower classes than this one give up their slots; None: no class does
        """
        table = self.table
        running = table.active()
        reserved = {slot: len(forks) for slot, forks in self.pending_forks.items()}
        slots = table.free_slots
        if priority is not None:
            lower = table.priority[running] > priority
            slots += int(lower.sum()) + int(np.count_nonzero(table.state == State.PREEMPTED))
            running = running[~lower]
            reserved = {slot: forks for slot, forks in reserved.items() if table.priority[slot] <= priority}
        return Startable(slots - sum(reserved.values()), running, reserved)

    def costs(self, pending: Pending, samples: int) -> StartCosts:
        """Return the costs of the first `samples` samples of `pending`.

        If the first has to prefill, it shares the pages that running sequences hold anyway; pages that are only cached
        count as its own. The others share the prompt's full pages with it. Samples that start late share them with the
        retained prompt.
        """
        size, tokens = self.paging.page_size, len(pending.tokens)
        full, others = (tokens - 1) // size, tokens // size
        if pending.fresh and self.retained_prompts.find(pending.request) is not None:
            return StartCosts(full, full, samples)
        if pending.fresh and pending.request.leader is not None:
            return StartCosts(others, others, 0)
        if pending.fresh and pending.request.needs_all:
            return StartCosts(0, others, tokens)
        locked, cached = self.paging.tree.depths(pending.tokens[: full * size], pending.request.salt)
        return StartCosts(locked, others, tokens - cached * size)

    def lead(self, pending: Pending, allowed: int) -> tuple[int, int]:
        """Assign a slot to the first of the samples; return it, and how many others, at most `allowed − 1`, follow."""
        samples, request = pending.samples, pending.request
        if request.stop_set is None:
            request.stop_set = self.stops.acquire(request.params)
        sample = samples.popleft()
        slot = self.table.claim_one(request, sample, pending.tokens)
        if pending.fresh:
            request.leader = slot
        self.paging.start(slot)
        self.adopt(slot)
        self._report_start(request, int(self.table.length[slot]))
        if sample in request.displaced:
            request.displaced.discard(sample)
        elif sample in request.preempted:
            self.recomputed_tokens += len(pending.tokens) - int(self.table.length[slot])
        return slot, self.follow(pending, allowed - 1) if samples else 0

    def take_newly_started(self) -> list[tuple[int, int, float]]:
        """Return the requests started since the last call, each as in `Progress.started`."""
        if not self._newly_started:
            return []
        now, started, self._newly_started = self._clock(), self._newly_started, []
        return [(rid, cached, now - at) for rid, cached, at in started]

    def adopt(self, slot: int) -> None:
        """Let the slot share the cached pages of its tokens, unless it has to compute all of them."""
        request = self.table.requests[slot]
        assert request is not None
        if not (request.needs_all and request.leader == slot):
            self.paging.adopt(slot)

    def follow(self, pending: Pending, allowed: int) -> int:
        """Let at most `allowed` of the samples fork from their request's leader later; return how many will."""
        request = pending.request
        assert request.leader is not None
        taken = _take(pending.samples, allowed)
        if taken:
            self.pending_forks.setdefault(request.leader, deque()).extend(taken)
            request.hold(len(taken))
        self._put_back(pending)
        return len(taken)

    def finish_prefill(self, slot: int, step: int) -> Int64:
        """Fork the pending forks of a slot whose prefill ends in `step`; return them, at the slot's length."""
        table, request = self.table, self.table.requests[slot]
        assert request is not None
        if request.leader != slot:
            return NOBODY
        request.leader, request.wants_prompt_outputs = None, False
        forks_left = self.pending_forks.pop(slot, deque())
        request.hold(-len(forks_left))
        is_current = table.salt[slot] == request.salt  # the cache was not cleared since the leader started
        if is_current and self.paging.fork_cost(slot) <= 1:
            forks = self._fork(slot, request, forks_left)
        else:
            self._put_back(Pending(request, forks_left, request.prompt))
            forks = NOBODY
        request.unsampled -= 1 + len(forks)
        if request.unsampled and is_current:
            self.retained_prompts.keep(request, slot, step)
        table.length[forks] = table.length[slot]
        return forks

    def start_late(self, retained: RetainedPrompt, pending: Pending, allowed: int, step: int) -> Int64:
        """Start as many of the samples as there are pages for, with a decode row in `step`; return their slots."""
        request = pending.request
        room = min(allowed, self.paging.available) if retained.ready <= step else 0
        samples = _take(pending.samples, room)
        self._put_back(pending)
        if not samples:
            return NOBODY
        enough = self.paging.evict_until_free(len(samples))
        assert enough
        slots = self.retained_prompts.start(retained, samples, step)
        request.unsampled -= len(samples)
        if not request.unsampled:
            self.retained_prompts.drop(request.rid)
        return slots

    def requeue(self, slot: int) -> None:
        """Put a preempted sequence, all of whose tokens are known, back at its place in the queue."""
        request = self.table.requests[slot]
        assert request is not None
        if request.leader == slot:
            request.leader = None
        sample = int(self.table.sample[slot])
        if (matcher := self.table.matchers.pop(slot, None)) is not None:
            request.parked_matchers[sample] = matcher
        forks_left = self.pending_forks.pop(slot, deque())
        request.hold(-len(forks_left))
        samples = deque([sample, *forks_left])
        tokens = self.table.tokens[slot, : self.table.known[slot]].copy()
        self.table.free(np.array([slot]))
        self.waiting.put_back(Pending(request, samples, tokens))

    def _fork(self, leader: int, request: Request, samples: deque[int]) -> Int64:
        """Fork as many of the samples as there are slots and pages for; return their slots. The others wait again."""
        if not samples:
            return NOBODY
        cost, room = self.paging.fork_cost(leader), self.table.free_slots
        taken = _take(samples, min(room, self.paging.available) if cost else room)
        self._put_back(Pending(request, samples, request.prompt))
        if not taken:
            return NOBODY
        enough = self.paging.evict_until_free(cost * len(taken))
        assert enough
        forks = self.table.claim(request, taken, request.prompt)
        self.paging.fork(leader, forks)
        return forks

    def _put_back(self, pending: Pending) -> None:
        if pending.samples:
            self.waiting.put_back(pending)

    def _report_start(self, request: Request, cached: int) -> None:
        if not request.reported:
            request.reported = True
            self.cached_tokens += cached
            self._newly_started.append((request.rid, cached, self._clock()))


def _take(samples: deque[int], most: int) -> list[int]:
    """Remove and return the first samples, at most `most`."""
    if most >= len(samples):
        taken = list(samples)
        samples.clear()
        return taken
    return [samples.popleft() for _ in range(min(most, len(samples)))]
