"""Budget: how much may be outstanding at once, handed out first come first served."""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """So many units. For one event loop."""

    def __init__(self, units: int) -> None:
        self._units = self._free = units
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Units that have not been given back."""
        return self._units - self._free

    async def take(self, units: int) -> int:
        """Waits for so many, of all at most; returns how many it took. Whoever came first gets them first."""
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
                self.give(units)
            else:
                self._hand_out()  # passes over this one
            raise
        return units

    def give(self, units: int) -> None:
        """Gives back what `take` returned."""
        self._free += units
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            units, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self._free -= units
            turn.set_result(None)
