"""Find the batch line that kills the engine: retry lines open at its death a few at a time, then alone.

    not suspected ─ a death ─► suspected ─ a death ─► computed alone ─ a death ─► guilty
    no limit                   √S at once             one at once

A line that is answered is innocent. A guilty line costs three deaths, as many as a replica survives by default. S
suspects take about 2 √S times as long as one of them; meanwhile no other line begins.

Requests of waiting clients are suspects, too. A line computed alone therefore waits up to `QUIET_WAIT_SECONDS` for a
moment without open client requests. If the engine dies with one of them open nevertheless, nothing is proven. The line
is then computed once more after a pause, in which other lines continue.
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

MIN_BATCH_PRIORITY = BACKGROUND_PRIORITY - MAX_RELATIVE_PRIORITY  # smallest priority of a batch line's requests
QUIET_WAIT_SECONDS = 10.0  # seconds that a line computed alone waits for a moment without open client requests
RETRY_PAUSE_SECONDS = 600.0  # seconds; keeps inconclusive deaths rarer than --restart-window allows
CHECK_SECONDS = 0.1  # seconds between checks of `quiet`

UNSUSPECTED, SUSPECTED, ALONE = range(3)
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
        self._max_suspected = 1  # how many suspected lines run together

    async def compute(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, called again after deaths of the engine.

        Errors: PoisonRequest; those of `attempt` except EngineDead.
        """
        stage, pause = UNSUSPECTED, 0.0
        while True:
            await asyncio.sleep(pause)
            await self._acquire_turn(stage)
            started_stage = stage
            try:
                if stage == ALONE:
                    await self._await_quiet()
                return await attempt()
            except EngineDead as error:
                with_clients = error.min_open_priority is not None and error.min_open_priority < MIN_BATCH_PRIORITY
                if stage == ALONE and error.min_open_priority is not None and not with_clients:
                    raise PoisonRequest from error
                log.warning("computing a batch line again: %s", error)
                if error.min_open_priority is None:  # the line was not open at the death
                    pause = CHECK_SECONDS
                else:
                    pause, stage = RETRY_PAUSE_SECONDS if stage == ALONE else 0.0, min(stage + 1, ALONE)
            finally:
                self._running[started_stage] -= 1
                self._start_waiting()

    async def _await_quiet(self) -> None:
        deadline = time.monotonic() + QUIET_WAIT_SECONDS
        while not self._quiet() and time.monotonic() < deadline:
            await asyncio.sleep(CHECK_SECONDS)

    async def _acquire_turn(self, stage: int) -> None:
        """Wait until the line may begin at stage `stage`."""
        turn, waiting = asyncio.get_running_loop().create_future(), self._waiting[stage]
        waiting.append(turn)
        if stage == SUSPECTED:
            self._max_suspected = max(self._max_suspected, math.isqrt(len(waiting) + self._running[stage]))
        self._start_waiting()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in waiting:
                waiting.remove(turn)
            elif not turn.cancelled():
                self._running[stage] -= 1  # the turn had been granted already
            self._start_waiting()
            raise

    def _may_begin(self, stage: int) -> bool:
        free, suspected, alone = self._running
        if stage == ALONE:
            return not (free or suspected or alone)
        if stage == SUSPECTED:
            return not (free or alone or self._waiting[ALONE]) and suspected < self._max_suspected
        return not (suspected or alone or self._waiting[SUSPECTED] or self._waiting[ALONE])

    def _start_waiting(self) -> None:
        """Let all lines begin that may begin now, first come, first served."""
        if not (self._running[SUSPECTED] or self._waiting[SUSPECTED]):
            self._max_suspected = 1
        for stage in (ALONE, SUSPECTED, UNSUSPECTED):
            while self._waiting[stage] and self._may_begin(stage):
                turn = self._waiting[stage].popleft()
                if not turn.done():  # else it was cancelled
                    turn.set_result(None)
                    self._running[stage] += 1
