"""Share slots fairly: choose whose samples start next within a class, and whose slots are taken back.

A free slot goes to the caller with the fewest running samples. Requests of one caller are served first come, first
served, with one exception: fewer than `MAX_SHARING_REQUESTS` requests hold all of the caller's slots, and another one
has waited for `QUANTUM`. Then a request's first sample comes before all others, and requests that run fewer samples
than their share come before those with more.

If no slot becomes free, callers below their share, and waiting requests without a running sample, get slots by
preempting the largest holder. A slot moves only to a holder that still has fewer afterwards, so slots never move back
and forth. `MAX_LOST_SHARE` bounds the tokens that preemption may waste.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from tok_core.manager.kv_cache import Paging, PreemptionPolicy
from tok_core.manager.requests import Account, Accounts, CallerQueue, Pending, Request, WaitingQueue
from tok_core.manager.sequences import State
from tok_core.messages import Int64

# Seconds: half of the second within which a request is to begin; the other half is for the step in progress.
QUANTUM = 0.5
CHECKS_PER_QUANTUM = 2  # checks per quantum
# Requests that share a caller's slots before they are served first come, first served: prefix groups stay large.
MAX_SHARING_REQUESTS = 32
MAX_COMPARED = 1024  # queue entries of one caller that are compared
MAX_TURNS = 4096  # turns that an admission rule considers per step
MAX_LOST_SHARE = 0.01  # share of the computed tokens that taking slots back may lose: below the noise of measurements


class StartTurn(NamedTuple):
    """Turn of `samples` of the waiting samples `pending` to start."""

    pending: Pending
    samples: int


Turns = Callable[[int], Iterator[StartTurn]]
"""Function that returns the turns, in order, in which a given number of samples start."""


class FairShares:
    """Order of the samples in `waiting`, and periodic checks whether slots must be taken back.

    overdue  number of samples that have waited too long and start even if the admission policy does not admit them
    """

    def __init__(
        self, paging: Paging, waiting: WaitingQueue, preemption: PreemptionPolicy, clock: Callable[[], float]
    ) -> None:
        self.accounts = Accounts()
        self.overdue = 0
        self._table = paging.table
        self._paging = paging
        self._preemption = preemption
        self._waiting = waiting
        self._clock = clock
        self._checked = clock()
        self._computed = 0  # tokens computed until the last check
        self._allowance = 0.0  # tokens that preemption may lose now

    def open(self, request: Request) -> None:
        """Register a new request."""
        self.accounts.open(request)
        request.queued_at = self._clock()

    def turns(self, most: int, classes: Iterable[int]) -> Iterator[StartTurn]:
        """Yield which samples of these classes start next, in order, at most `most` of them.

        The iteration may be stopped early. The queue must not change during it.
        """
        now = self._clock()
        for priority in classes:
            queues = self._waiting.queues(priority)
            for queue, count in _levelled(queues, most) if len(queues) > 1 else [(queue, most) for queue in queues]:
                left = count
                for turn in self._of_queue(queue, count, now):
                    taken = min(turn.samples, left)
                    yield turn if taken == turn.samples else StartTurn(turn.pending, taken)
                    left, most = left - taken, most - taken
                    if not left:
                        break
            if most <= 0:
                return

    def _of_queue(self, queue: CallerQueue, most: int, now: float) -> Iterable[StartTurn]:
        account, head = queue.account, queue.first
        share = max(1, (account.running + most) // min(max(1, len(account.open)), MAX_SHARING_REQUESTS))
        if head.request.running + len(head.samples) > share and account.holders < MAX_SHARING_REQUESTS:
            others = islice(queue, 1, MAX_COMPARED)
            if any(one.request.running < share and _is_overdue(one.request, now) for one in others):
                return _capped(queue, share, MAX_SHARING_REQUESTS - account.holders, now)
        return (StartTurn(pending, len(pending.samples)) for pending in queue)

    def check(self, computed: int) -> list[int]:
        """Set `overdue`, and return the slots to preempt for these samples.

        Less than half a `QUANTUM` after the last check, change nothing and return no slots.

        computed  tokens computed so far
        """
        now = self._clock()
        if 0 <= now - self._checked < QUANTUM / CHECKS_PER_QUANTUM:
            return []
        most = float(self._table.slots * self._table.page_size)
        self._allowance = min(self._allowance + MAX_LOST_SHARE * (computed - self._computed), most)
        self._checked, self._computed, self.overdue = now, computed, 0
        first = self._waiting.min_waiting_priority
        return [] if first is None else self._take_back(first, now)

    def _take_back(self, priority: int, now: float) -> list[int]:
        """Return slots of one class to take: for callers below their share, then for requests without running ones."""
        queues = sorted(self._waiting.queues(priority), key=lambda queue: queue.account.running)
        plan = _PreemptionPlan(self._paging, self._preemption, priority, self._allowance)
        accounts = list(self.accounts.of_class(priority))
        if len(accounts) > 1:
            self._level_accounts(accounts, queues, plan)
        for queue in queues:
            self.overdue += self._first_starts(queue, plan, now)
        self._allowance -= plan.lost
        return plan.to_preempt

    def _level_accounts(self, accounts: list[Account], queues: list[CallerQueue], plan: _PreemptionPlan) -> None:
        """Free slots for samples of callers that have waited and hold less than their share."""
        waiting = {queue.account.id: queue.samples(self._table.slots) for queue in queues}
        for one in accounts:
            one.checks = one.checks + 1 if one.id in waiting else 0
        wanted = np.array([one.running + waiting.get(one.id, 0) for one in accounts], np.int64)
        share = max(1, _level(np.zeros_like(wanted), wanted, sum(one.running for one in accounts) + plan.free))
        for queue in queues:
            account = queue.account
            starts = min(share - account.running, waiting[account.id])
            if account.checks > CHECKS_PER_QUANTUM and starts > 0:
                holders = plan.holders(self._table.account)
                got = sum(
                    plan.add_preemptions(holders, max(share, account.running + 1), queue.first) for _ in range(starts)
                )
                self.overdue += got > 0

    def _first_starts(self, queue: CallerQueue, plan: _PreemptionPlan, now: float) -> int:
        """Free a slot for each of the caller's requests without a running sample; return how many of them get one."""
        account, table = queue.account, self._table
        most = MAX_SHARING_REQUESTS - account.holders
        if most <= 0 or account.running <= account.holders:
            return 0
        overdue = [
            one for one in islice(queue, MAX_COMPARED) if not one.request.running and _is_overdue(one.request, now)
        ]
        holders = plan.holders(table.rid, account.id) if overdue else {}
        return sum(plan.add_preemptions(holders, 1, one) for one in overdue[:most])


class _PreemptionPlan:
    """Slots `to_preempt`, all of one class; the free slots and pages that this gives, and the tokens that it loses."""

    def __init__(self, paging: Paging, preemption: PreemptionPolicy, priority: int, allowance: float) -> None:
        table = paging.table
        self.to_preempt: list[int] = []
        self.lost = 0
        self.free = table.free_slots + table.ended + int(np.count_nonzero(table.state == State.PREEMPTED))
        self._pages = paging.available
        self._table = table
        self._preemption = preemption
        self._priority = priority
        self._allowance = allowance

    def holders(self, owner: Int64, account: int | None = None) -> dict[int, list[tuple[int, int]]]:
        """Return running slots by `owner`, a column of the table, each with the tokens it would lose, least last."""
        table = self._table
        slots = table.active()
        slots = slots[table.priority[slots] == self._priority]
        if account is not None:
            slots = slots[table.account[slots] == account]
        ranked, lost = self._preemption.rank(slots[~np.isin(slots, self.to_preempt)])
        found: dict[int, list[tuple[int, int]]] = {}
        ranked, lost = ranked[::-1], lost[::-1]
        for one, slot, tokens in zip(owner[ranked].tolist(), ranked.tolist(), lost.tolist(), strict=True):
            found.setdefault(one, []).append((slot, tokens))
        return found

    def add_preemptions(self, holders: dict[int, list[tuple[int, int]]], min_slots: int, pending: Pending) -> bool:
        """Add slots to preempt until one more sample can start; return whether it can.

        Each holder keeps at least `min_slots` slots. The first preemption is always allowed. Further ones are allowed
        while the tokens that all of them lose stay within the allowance, or within those of `pending` if it has more.
        """
        size = self._table.page_size
        pages = -(-len(pending.tokens) // size) + 1
        while self.free < 1 or self._pages < pages:
            held = max(holders.values(), key=len, default=[])
            if len(held) <= min_slots:
                return False
            slot, tokens = held[-1]
            if self.to_preempt and self.lost + tokens > max(self._allowance, len(pending.tokens)):
                return False
            held.pop()
            self.to_preempt.append(slot)
            self.lost += tokens
            self.free += 1
            self._pages += -(-tokens // size)
        self.free -= 1
        self._pages -= pages
        return True


def _is_overdue(request: Request, now: float) -> bool:
    return now - request.queued_at >= QUANTUM


def _capped(queue: CallerQueue, share: int, begin: int, now: float) -> Iterator[StartTurn]:
    """Return turns in three rounds.

    First comes one sample each of up to `begin` overdue requests without a running sample, then each request up to its
    share, then the rest.
    """
    given: Counter[int] = Counter()
    firsts, within, beyond = list[StartTurn](), list[StartTurn](), list[StartTurn]()
    for pending in islice(queue, MAX_COMPARED):
        request, left = pending.request, len(pending.samples)
        first = int(len(firsts) < begin and _is_overdue(request, now))
        for turns, most in ((firsts, first), (within, share), (beyond, left)):
            count = min(left, most if turns is beyond else max(0, most - request.running - given[request.rid]))
            if count:
                turns.append(StartTurn(pending, count))
                given[request.rid] += count
                left -= count
    return chain(firsts, within, beyond)


def _levelled(queues: Collection[CallerQueue], most: int) -> list[tuple[CallerQueue, int]]:
    """Return queues and how many of their samples to start, so that all callers run equally many in the end."""
    ordered = sorted(queues, key=lambda queue: (queue.account.running, queue.first.order))
    running = np.array([queue.account.running for queue in ordered], np.int64)
    waiting = np.array([queue.samples(most) for queue in ordered], np.int64)
    low = _level(running, waiting, most)
    gets = np.clip(low - running, 0, waiting)
    more = ((gets < waiting) & (running <= low)).nonzero()[0][: most - int(gets.sum())]
    gets[more] += 1
    return [(queue, count) for queue, count in zip(ordered, gets.tolist(), strict=True) if count]


def _level(running: Int64, waiting: Int64, most: int) -> int:
    """Return the level up to which callers' running samples can be filled by starting at most `most` of those waiting.

    `running`, `waiting`: samples per caller, int64 [n]. With [0, 3] running, [9, 9] waiting and 5 to start: 4.
    """
    low, high = int(running.min()), int(running.max()) + most
    while low < high:
        level = (low + high + 1) // 2
        if np.clip(level - running, 0, waiting).sum() <= most:
            low = level
        else:
            high = level - 1
    return low
