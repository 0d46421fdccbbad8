"""WaitingQueue: samples that wait for a slot, strictly first come first served."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator

from tok_core.manager.sequences import Pending


def _order(pending: Pending) -> tuple[int, int]:
    return pending.order


class WaitingQueue:
    """New requests in order of arrival, merged with preempted and left-over samples that return to their old place."""

    def __init__(self) -> None:
        self._fresh: deque[Pending] = deque()
        self._back: list[Pending] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._back)

    def __iter__(self) -> Iterator[Pending]:
        return heapq.merge(self._back, self._fresh, key=_order)

    def append(self, pending: Pending) -> None:
        """A request that arrives after all the others."""
        self._fresh.append(pending)

    def put_back(self, pending: Pending) -> None:
        """Samples that were here before."""
        insort(self._back, pending, key=_order)

    def pop(self) -> Pending:
        """The first of all."""
        if self._back and (not self._fresh or self._back[0].order < self._fresh[0].order):
            return self._back.pop(0)
        return self._fresh.popleft()

    def remove(self, rids: set[int]) -> None:
        """Drops the samples of these requests."""
        self._fresh = deque(pending for pending in self._fresh if pending.request.rid not in rids)
        self._back = [pending for pending in self._back if pending.request.rid not in rids]
