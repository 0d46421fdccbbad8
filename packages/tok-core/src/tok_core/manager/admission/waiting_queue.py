"""Queue samples that wait for a slot, by class and caller; of one caller, first come, first served."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator

from tok_core.manager.accounts import Account
from tok_core.manager.sequences import Pending


def _order(pending: Pending) -> tuple[int, int, int]:
    return pending.order


class CallerQueue:
    """Queue of one caller in one class: new requests by arrival, merged with samples put back at their place."""

    __slots__ = ("_back", "_fresh")

    def __init__(self) -> None:
        self._fresh: deque[Pending] = deque()
        self._back: list[Pending] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._back)

    def __iter__(self) -> Iterator[Pending]:
        return heapq.merge(self._back, self._fresh, key=_order) if self._back else iter(self._fresh)

    @property
    def first(self) -> Pending:
        """Return the oldest entry; there must be one."""
        return next(iter(self))

    @property
    def account(self) -> Account:
        """Return the caller's account."""
        return (self._fresh or self._back)[0].request.account

    def samples(self, max_samples: int) -> int:
        """Return how many samples wait, or `max_samples` if that is less."""
        found = 0
        for pending in self:
            found += len(pending.samples)
            if found >= max_samples:
                return max_samples
        return found

    def append(self, pending: Pending) -> None:
        """Add a request that arrives after all the others."""
        self._fresh.append(pending)

    def put_back(self, pending: Pending) -> None:
        """Insert samples at their place by age."""
        insort(self._back, pending, key=_order)

    def take(self, pending: Pending) -> bool:
        """Remove an entry; return whether it was there."""
        if self._fresh and self._fresh[0] is pending:
            self._fresh.popleft()
            return True
        for some in (self._back, self._fresh):
            try:
                some.remove(pending)
            except ValueError:
                continue
            return True
        return False

    def remove(self, rids: set[int]) -> None:
        """Drop the samples of these requests."""
        self._fresh = deque(one for one in self._fresh if one.request.rid not in rids)
        self._back = [one for one in self._back if one.request.rid not in rids]


class WaitingQueue:
    """Queues by class and caller; none of them is empty."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, CallerQueue]] = {}  # by priority, ascending, and tenant

    def __len__(self) -> int:
        return sum(len(line) for lines in self._classes.values() for line in lines.values())

    def __bool__(self) -> bool:
        return bool(self._classes)

    def __iter__(self) -> Iterator[Pending]:
        """Iterate by class, and within a class by arrival, across callers."""
        for lines in self._classes.values():
            yield from heapq.merge(*lines.values(), key=_order) if len(lines) > 1 else next(iter(lines.values()))

    @property
    def min_open_priority(self) -> int | None:
        """Return the smallest priority number that waits."""
        return next(iter(self._classes), None)

    def classes(self) -> list[int]:
        """Return the priorities that wait, ascending."""
        return list(self._classes)

    def lines(self, priority: int) -> Collection[CallerQueue]:
        """Return the callers' queues of one class."""
        return self._classes.get(priority, {}).values()

    def append(self, pending: Pending) -> None:
        """Add a request that arrives after all the others."""
        self._line(pending).append(pending)

    def put_back(self, pending: Pending) -> None:
        """Insert samples at their place by age."""
        self._line(pending).put_back(pending)

    def take(self, pending: Pending) -> bool:
        """Remove an entry; return whether it was there."""
        priority, tenant = _place(pending)
        line = self._classes.get(priority, {}).get(tenant)
        taken = line is not None and line.take(pending)
        if line is not None and not line:
            self._drop(priority, tenant)
        return taken

    def remove(self, rids: set[int]) -> None:
        """Drop the samples of these requests."""
        for priority, lines in list(self._classes.items()):
            for tenant, line in list(lines.items()):
                line.remove(rids)
                if not line:
                    self._drop(priority, tenant)

    def _line(self, pending: Pending) -> CallerQueue:
        priority, tenant = _place(pending)
        if priority not in self._classes:
            self._classes[priority] = {}
            self._classes = dict(sorted(self._classes.items()))
        lines = self._classes[priority]
        if tenant not in lines:
            lines[tenant] = CallerQueue()
        return lines[tenant]

    def _drop(self, priority: int, tenant: str) -> None:
        del self._classes[priority][tenant]
        if not self._classes[priority]:
            del self._classes[priority]


def _place(pending: Pending) -> tuple[int, str]:
    return pending.request.params.priority, pending.request.tenant
