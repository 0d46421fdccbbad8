"""Context: what all handlers of one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from tok_core import AsyncEngine
from tok_server.errors import unavailable
from tok_server.metrics import Metrics
from tok_server.settings import Settings

T = TypeVar("T")


@dataclass(slots=True)
class Context:
    """What all handlers of one server share.

    pool           threads for reading requests (JSON, template, tokens) and writing whole answers. What takes less
                   time than handing it to a thread would, stays on the event loop: short prompts of token ids, answers
                   of few choices, events of a stream
    ready          the engine has started: it knows its sizes and takes requests
    draining       the server is about to stop: new requests are turned away
    open_requests  requests being answered now
    warned         unknown fields that the log has mentioned already
    """

    engine: AsyncEngine
    settings: Settings
    metrics: Metrics
    pool: ThreadPoolExecutor
    created: int = field(default_factory=lambda: int(time.time()))
    ready: bool = False
    draining: bool = False
    open_requests: int = 0
    warned: set[str] = field(default_factory=set)

    @property
    def state(self) -> str:
        """What /health says in one word: "draining", or the engine's own state."""
        if self.draining:
            return "draining"
        return self.engine.health().state if self.ready else "starting"

    def admit(self) -> None:
        """Raises ApiError (503) while no request can be taken."""
        if self.draining:
            raise unavailable("the server is stopping", "draining")
        self.await_start()

    def await_start(self) -> None:
        """Raises ApiError (503) until the model can be asked for the first time."""
        if not self.ready:
            raise unavailable("the engine is starting", "starting")

    async def work(self, function: Callable[[], T], *, short: bool = False) -> T:
        """What `function` returns, computed in a thread unless it is `short`: below some 0.2 ms."""
        if short:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)


CONTEXT = web.AppKey("CONTEXT", Context)
