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

    def remove(self, rid: int) -> int:
        """Drops the samples of a request; returns how many."""
        dropped = 0
        for queue in (self._fresh, self._back):
            for pending in [pending for pending in queue if pending.request.rid == rid]:
                queue.remove(pending)
                dropped += len(pending.samples)
        return dropped
