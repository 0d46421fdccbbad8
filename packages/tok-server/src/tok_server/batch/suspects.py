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
        self._waiting = [0, 0, 0]
        self._at_once = 1  # of the suspected
        self._changed = asyncio.Event()

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
        self._waiting[how] += 1
        try:
            if how == SUSPECTED:
                self._at_once = max(self._at_once, math.isqrt(self._waiting[how]))
            while not self._may_begin(how):
                await self._changed.wait()
        finally:
            self._waiting[how] -= 1
            self._tell()
        self._running[how] += 1

    def _may_begin(self, how: int) -> bool:
        free, suspected, alone = self._running
        if how == ALONE:
            return not (free or suspected or alone)
        if how == SUSPECTED:
            return not (free or alone or self._waiting[ALONE]) and suspected < self._at_once
        return not (suspected or alone or self._waiting[SUSPECTED] or self._waiting[ALONE])

    def _tell(self) -> None:
        """Whoever waits looks again."""
        if not (self._running[SUSPECTED] or self._waiting[SUSPECTED]):
            self._at_once = 1
        if any(self._waiting):
            self._changed.set()
            self._changed = asyncio.Event()
