"""WaitingQueue: samples that wait for a slot, by class, and within one strictly first come first served."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain

from tok_core.manager.sequences import Pending


def _order(pending: Pending) -> tuple[int, int, int]:
    return pending.order


class WaitingQueue:
    """New requests in order of arrival, merged with preempted and left-over samples that return to their old place."""

    def __init__(self) -> None:
        self._fresh: dict[int, deque[Pending]] = {}  # by class, in the order of classes; none is empty
        self._back: list[Pending] = []

    def __len__(self) -> int:
        return sum(map(len, self._fresh.values())) + len(self._back)

    def __bool__(self) -> bool:
        return bool(self._fresh or self._back)

    def __iter__(self) -> Iterator[Pending]:
        return heapq.merge(self._back, chain.from_iterable(self._fresh.values()), key=_order)

    def append(self, pending: Pending) -> None:
        """A request that arrives after all the others."""
        priority = pending.request.params.priority
        if priority not in self._fresh:
            self._fresh[priority] = deque()
            self._fresh = dict(sorted(self._fresh.items()))
        self._fresh[priority].append(pending)

    def put_back(self, pending: Pending) -> None:
        """Samples that were here before."""
        insort(self._back, pending, key=_order)

    def pop(self) -> Pending:
        """The first of all."""
        priority, first = next(iter(self._fresh.items()), (0, None))
        if first is None or (self._back and self._back[0].order < first[0].order):
            return self._back.pop(0)
        pending = first.popleft()
        if not first:
            del self._fresh[priority]
        return pending

    def remove(self, rids: set[int]) -> None:
        """Drops the samples of these requests."""
        kept = ((priority, _without(rids, pending)) for priority, pending in self._fresh.items())
        self._fresh = {priority: pending for priority, pending in kept if pending}
        self._back = list(_without(rids, self._back))


def _without(rids: set[int], waiting: deque[Pending] | list[Pending]) -> deque[Pending]:
    return deque(pending for pending in waiting if pending.request.rid not in rids)
