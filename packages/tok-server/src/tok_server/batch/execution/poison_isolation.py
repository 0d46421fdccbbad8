"""Find the batch line that kills the engine: retry lines open at its death a few at a time, then alone.

    not suspected ─ a death ─► suspected ─ a death ─► computed alone ─ a death ─► guilty
    no limit                   √S at once             one at once

A line that is answered is innocent. A guilty line costs three deaths, as many as a replica survives by default. S
suspects take about 2 √S times as long as one of them; meanwhile no other line begins.

Requests of waiting clients are suspects, too. A line computed alone therefore waits up to `QUIET` seconds for a moment
without open client requests. If the engine dies with one of them open nevertheless, nothing is proven. The line is then
computed once more after a pause, in which other lines continue.
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
from tok_server.openai import BACKGROUND_PRIORITY, MAX_RELATIVE_PRIORITY

log = logging.getLogger("tok.server")

T = TypeVar("T")

BATCHES = BACKGROUND_PRIORITY - MAX_RELATIVE_PRIORITY  # smallest priority of a batch line's requests
QUIET = 10.0  # seconds that a line computed alone waits for a moment without open client requests
PAUSE = 600.0  # seconds; keeps inconclusive deaths rarer than --restart-window allows
LOOK_EVERY = 0.1  # seconds between checks of `quiet`

FREE, SUSPECTED, ALONE = range(3)
"""Stages of a line, by the number of engine deaths at which it was open."""


class PoisonRequest(Exception):
    """The engine died while it computed this line alone."""


class PoisonIsolation:
    """The lines of all batches of one engine. For one event loop.

    quiet  returns whether no client waits for an answer now
    """

    def __init__(self, quiet: Callable[[], bool] = lambda: True) -> None:
        self._quiet = quiet
        self._running = [0, 0, 0]  # lines, by stage
        self._waiting = tuple(deque[asyncio.Future[None]]() for _ in self._running)
        self._at_once = 1  # how many suspected lines run together

    async def compute(self, once: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `once`, called again after deaths of the engine.

        Errors: PoisonRequest; those of `once` except EngineDead.
        """
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
                beside = error.min_open_priority is not None and error.min_open_priority < BATCHES
                if how == ALONE and error.min_open_priority is not None and not beside:
                    raise PoisonRequest from error
                log.warning("a line of a batch is computed anew: %s", error)
                if error.min_open_priority is None:  # the line was not open at the death
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
        """Wait until the line may begin at stage `how`."""
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
                self._running[how] -= 1  # the turn had been granted already
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
        """Let all lines begin that may begin now, first come, first served."""
        if not (self._running[SUSPECTED] or self._waiting[SUSPECTED]):
            self._at_once = 1
        for how in (ALONE, SUSPECTED, FREE):
            while self._waiting[how] and self._may_begin(how):
                turn = self._waiting[how].popleft()
                if not turn.done():  # else it was cancelled
                    turn.set_result(None)
                    self._running[how] += 1
