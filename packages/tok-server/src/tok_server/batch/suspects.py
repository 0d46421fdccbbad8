"""Suspects: which line is it that kills the engine? Those open when it dies are computed few at a time, then alone.

    not suspected ─ a death ─► suspected ─ a death ─► computed alone ─ a death ─► guilty
    as many as may be          √ of them at once

A line that is answered is innocent. A guilty one costs three deaths, as many as a replica survives by default; S
suspects take about 2 √S times as long as one of them, and meanwhile no other line begins.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tok_core import EngineDead

log = logging.getLogger("tok.server")

T = TypeVar("T")

FREE, SUSPECTED, ALONE = range(3)
"""How a line is computed: by how many times the engine has died of it, or of one beside it."""


class Guilty(Exception):
    """The engine died while it computed this line, and no other."""


class Suspects:
    """The lines of all batches of one engine. For one event loop."""

    def __init__(self) -> None:
        self._running = [0, 0, 0]  # lines, by how they are computed
        self._waiting = tuple(deque[asyncio.Future[None]]() for _ in self._running)
        self._at_once = 1  # of the suspected

    async def compute(self, once: Callable[[], Awaitable[T]]) -> T:
        """What `once` returns, called again after a death. Errors: Guilty, its own but EngineDead."""
        for how in (FREE, SUSPECTED, ALONE):
            await self._begin(how)
            try:
                return await once()
            except EngineDead as error:
                if how == ALONE:
                    raise Guilty from error
                log.warning("a line of a batch is computed anew: %s", error)
            finally:
                self._running[how] -= 1
                self._tell()
        raise AssertionError("unreachable")

    async def _begin(self, how: int) -> None:
        """Waits for its turn."""
        turn, waiting = asyncio.get_running_loop().create_future(), self._waiting[how]
        waiting.append(turn)
        if how == SUSPECTED:
            self._at_once = max(self._at_once, math.isqrt(len(waiting) + self._running[how]))
        self._tell()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in waiting:
                waiting.remove(turn)
            elif not turn.cancelled():
                self._running[how] -= 1  # it had been given its turn
            self._tell()
            raise

    def _may_begin(self, how: int) -> bool:
        free, suspected, alone = self._running
        if how == ALONE:
            return not (free or suspected or alone)
        if how == SUSPECTED:
            return not (free or alone or self._waiting[ALONE]) and suspected < self._at_once
        return not (suspected or alone or self._waiting[SUSPECTED] or self._waiting[ALONE])

    def _tell(self) -> None:
        """Whoever may begin now does, first come, first served."""
        if not (self._running[SUSPECTED] or self._waiting[SUSPECTED]):
            self._at_once = 1
        for how in (ALONE, SUSPECTED, FREE):
            while self._waiting[how] and self._may_begin(how):
                turn = self._waiting[how].popleft()
                if not turn.done():  # else it was cancelled
                    turn.set_result(None)
                    self._running[how] += 1
