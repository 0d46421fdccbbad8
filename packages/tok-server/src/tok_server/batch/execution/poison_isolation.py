"""Find the batch line that kills the engine: compute those open at its death few at a time, then alone.

    not suspected ─ a death ─► suspected ─ a death ─► computed alone ─ a death ─► guilty
    as many as may be          √ of them at once

A line that is answered is innocent. A guilty one costs three deaths, as many as a replica survives by default; S
suspects take about 2 √S times as long as one of them, and meanwhile no other line begins.

Requests that somebody waits for are suspects, too. A line computed alone begins when none of them is open, if such a
moment comes soon. Where the engine dies with one of them open nevertheless, nothing is proven: the line is computed
once more after a pause, in which other lines go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tok_core import EngineDead
from tok_server.openai import APART, BEHIND

log = logging.getLogger("tok.server")

T = TypeVar("T")

BATCHES = BEHIND - APART  # the smallest priority of a line's requests
QUIET = 10.0  # seconds that a line computed alone waits for a moment in which nobody waits for an answer
PAUSE = 600.0  # so that deaths of which nothing is learned are rarer than --restart-window allows
LOOK_EVERY = 0.1

FREE, SUSPECTED, ALONE = range(3)
"""How a line is computed: by how many times the engine has died of it, or of one beside it."""


class PoisonRequest(Exception):
    """The engine died while it computed this line, and no other."""


class PoisonIsolation:
    """The lines of all batches of one engine. For one event loop.

    quiet  tells whether nobody waits for an answer now
    """

    def __init__(self, quiet: Callable[[], bool] = lambda: True) -> None:
        self._quiet = quiet
        self._running = [0, 0, 0]  # lines, by how they are computed
        self._waiting = tuple(deque[asyncio.Future[None]]() for _ in self._running)
        self._at_once = 1  # of the suspected

    async def compute(self, once: Callable[[], Awaitable[T]]) -> T:
        """What `once` returns, called again after a death. Errors: Guilty, its own but EngineDead."""
        how, pause = FREE, 0.0
        while True:
            await asyncio.sleep(pause)
            await self._begin(how)
            how_begun = how
            try:
                if how == ALONE:
                    await self._await_quiet()
                return await once()
            except EngineDead as error:
                beside = error.first_class is not None and error.first_class < BATCHES
                if how == ALONE and error.first_class is not None and not beside:
                    raise PoisonRequest from error
                log.warning("a line of a batch is computed anew: %s", error)
                if error.first_class is None:  # it was not open
                    pause = LOOK_EVERY
                else:
                    pause, how = PAUSE if how == ALONE else 0.0, min(how + 1, ALONE)
            finally:
                self._running[how_begun] -= 1
                self._tell()

    async def _await_quiet(self) -> None:
        until = time.monotonic() + QUIET
        while not self._quiet() and time.monotonic() < until:
            await asyncio.sleep(LOOK_EVERY)

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
