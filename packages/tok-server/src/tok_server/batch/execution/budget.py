"""Budget: a limit on units of outstanding work, handed out first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """A fixed number of units. For one event loop."""

    def __init__(self, units: int) -> None:
        self._units = self._free = units
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Return the number of units that have not been given back."""
        return self._units - self._free

    async def acquire(self, units: int) -> int:
        """Wait for `units`, at most the whole budget, and return how many were taken. First come, first served."""
        units = min(units, self._units)
        if not self._waiting and units <= self._free:
            self._free -= units
            return units
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(units)
            else:
                self._wake_waiters()  # skips this cancelled waiter
            raise
        return units

    def release(self, units: int) -> None:
        """Give back the units that `acquire` returned."""
        self._free += units
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            units, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self._free -= units
            turn.set_result(None)
