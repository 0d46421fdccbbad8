"""Context: what all handlers of one server share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from tok_core import AsyncEngine
from tok_server.http.allowed_hosts import AllowedHosts
from tok_server.http.auth import ApiKeys
from tok_server.http.origins import Origins
from tok_server.limits import Deadlines, LoopThrottle, RateLimits
from tok_server.observability import Latencies, Metrics, Telemetry
from tok_server.settings import Settings
from tok_server.wire import limited, unavailable

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
    open_prompts   prompts that the engine has got from callers who wait, by tenant
    held_bytes     bytes of their bodies
    keys, origins, hosts, rates  who may ask, from where, by which name, and how often
    deadlines      until when requests must be answered
    turns          how many of them begin in one turn of the event loop
    unhurried      how many requests the engine has got that nobody waits for
    telemetry      where spans of requests go
    latencies      how long requests took lately
    background     work that goes on when whoever asked for it has gone
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
    open_prompts: Counter[str] = field(default_factory=Counter)
    held_bytes: int = 0
    warned: set[str] = field(default_factory=set)
    keys: ApiKeys = field(init=False)
    origins: Origins = field(init=False)
    hosts: AllowedHosts = field(init=False)
    rates: RateLimits = field(init=False)
    deadlines: Deadlines = field(init=False)
    turns: LoopThrottle = field(default_factory=LoopThrottle)
    unhurried: Callable[[], int] = lambda: 0
    telemetry: Telemetry | None = None
    latencies: Latencies = field(default_factory=Latencies)
    background: set[asyncio.Future[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = self.settings
        self.keys = ApiKeys(settings.api_keys, settings.admin_key)
        self.origins = Origins(settings.allow_origins)
        self.hosts = AllowedHosts(settings.host, settings.allowed_hosts)
        self.deadlines = Deadlines(settings.request_timeout)
        self.rates = RateLimits(settings.rate_limit_requests, settings.rate_limit_tokens)
        if settings.otlp_endpoint is not None:
            self.telemetry = Telemetry(settings.otlp_endpoint, settings.model_name)

    @property
    def state(self) -> str:
        """What /health says in one word: "draining", or the engine's own state."""
        if self.draining:
            return "draining"
        return self.engine.health().state if self.ready else "starting"

    def admit(self, tenant: str) -> None:
        """Raises ApiError while no request can be taken (503), or too many wait already (429).

        Callers who have fewer prompts open than their part of those that may wait are let in: others fill the queue.
        """
        if self.draining:
            raise unavailable("the server is stopping", "draining")
        self.await_start()
        most = self.settings.max_queued
        # Asked for only where it can matter: the engine's own figures take their time.
        if self.engine.open_requests >= most and self.waiting >= most:
            if self.open_prompts[tenant] < most // len({tenant, *(+self.open_prompts)}) and tenant:
                return
            raise limited("max_queued", 429, f"{most} requests wait already", kind="requests", retry_after=1)

    @contextmanager
    def having(self, tenant: str, prompts: int) -> Iterator[None]:
        """So many more of the tenant's are open meanwhile."""
        self.open_prompts[tenant] += prompts
        try:
            yield
        finally:
            self.open_prompts[tenant] -= prompts
            if not self.open_prompts[tenant]:
                del self.open_prompts[tenant]

    @property
    def waiting(self) -> int:
        """Requests that the engine has got and does not compute yet, those aside that nobody waits for.

        A prompt is a request. Those nobody waits for that run count as if somebody did: they give way soon.
        """
        waiting = self.engine.open_requests - int(self.engine.stats()["requests_running"])
        return max(0, waiting - self.unhurried())

    def await_start(self) -> None:
        """Raises ApiError (503) until the model can be asked for the first time."""
        if not self.ready:
            raise unavailable("the engine is starting", "starting")

    async def work(self, function: Callable[[], T]) -> T:
        """What `function` returns, computed in a thread: not worth it for what takes less than some 0.2 ms."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)


CONTEXT = web.AppKey("CONTEXT", Context)
