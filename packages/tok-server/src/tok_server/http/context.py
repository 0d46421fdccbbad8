"""Context: state that all handlers of one server share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from tok_core import AsyncEngine
from tok_server.http.access import AllowedHosts, ApiKeys, Origins
from tok_server.http.request_limits import LoopThrottle, RateLimits
from tok_server.observability import Latencies, Metrics, Telemetry
from tok_server.settings import Settings
from tok_server.wire import ErrorFormat, limited, unavailable

T = TypeVar("T")


@dataclass(slots=True)
class Context:
    """State that all handlers of one server share.

    pool                 threads that parse requests (JSON, template, tokens) and encode whole responses. Work shorter
                         than a thread hand-over stays on the event loop: short prompts of token ids, responses of few
                         choices, events of a stream
    ready                the engine has started, so that its sizes are known and it takes requests
    draining             the server is stopping; new requests are refused
    open_requests        requests being answered now
    open_prompts         prompts submitted to the engine for waiting clients, by tenant
    body_bytes           bytes of the open requests' bodies
    warned_fields        unknown fields that the log has mentioned already
    keys, origins, hosts, rate_limits    checks of API key, web origin, host name and rate limits
    throttle             limit of requests that begin in one turn of the event loop
    background_requests  returns how many of the engine's requests belong to batches, for which no client waits
    telemetry            exporter of request spans
    latencies            durations of recent requests
    error_formats        path -> form of its errors, of paths that do not write them as OpenAI does
    background           tasks that continue after the requesting client has disconnected
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
    body_bytes: int = 0
    warned_fields: set[str] = field(default_factory=set)
    keys: ApiKeys = field(init=False)
    origins: Origins = field(init=False)
    hosts: AllowedHosts = field(init=False)
    rate_limits: RateLimits = field(init=False)
    throttle: LoopThrottle = field(default_factory=LoopThrottle)
    background_requests: Callable[[], int] = lambda: 0
    telemetry: Telemetry | None = None
    latencies: Latencies = field(default_factory=Latencies)
    error_formats: Mapping[str, ErrorFormat] = field(default_factory=dict)
    background: set[asyncio.Future[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = self.settings
        self.keys = ApiKeys(settings.api_keys, settings.admin_key)
        self.origins = Origins(settings.allow_origins)
        self.hosts = AllowedHosts(settings.host, settings.allowed_hosts)
        self.rate_limits = RateLimits(settings.rate_limit_requests, settings.rate_limit_tokens)
        if settings.otlp_endpoint is not None:
            self.telemetry = Telemetry(settings.otlp_endpoint, settings.model_name)

    @property
    def state(self) -> str:
        """Return the status for /health: "draining", "starting" or the engine's own state."""
        if self.draining:
            return "draining"
        return self.engine.health().state if self.ready else "starting"

    def admit(self, tenant: str) -> None:
        """Raise ApiError if no request can be accepted (503), or too many wait already (429).

        A tenant with fewer open prompts than an equal share of `max_queued` is admitted: others fill the queue.
        """
        if self.draining:
            raise unavailable("the server is stopping", "draining")
        self.require_started()
        max_queued = self.settings.max_queued
        # `waiting` is evaluated only if it can matter: reading the engine's statistics takes time.
        if self.engine.open_requests >= max_queued and self.waiting >= max_queued:
            if self.open_prompts[tenant] < max_queued // len({tenant, *(+self.open_prompts)}) and tenant:
                return
            raise limited(
                "max_queued",
                429,
                f"the maximum of {max_queued} requests is queued",
                kind="requests",
                retry_after=1,
            )

    @contextmanager
    def track_prompts(self, tenant: str, prompts: int) -> Iterator[None]:
        """Count `prompts` more open prompts of the tenant while the context lasts."""
        self.open_prompts[tenant] += prompts
        try:
            yield
        finally:
            self.open_prompts[tenant] -= prompts
            if not self.open_prompts[tenant]:
                del self.open_prompts[tenant]

    @property
    def waiting(self) -> int:
        """Return how many client requests wait in the engine. Each prompt counts as a request.

        Batch requests do not count. Each one that runs lowers the result by one, since it soon gives way to a client.
        """
        waiting = self.engine.open_requests - int(self.engine.stats()["requests_running"])
        return max(0, waiting - self.background_requests())

    def require_started(self) -> None:
        """Raise ApiError (503) until the engine has started."""
        if not self.ready:
            raise unavailable("the engine is starting", "starting")

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, run in a thread. Not worthwhile for work of less than about 0.2 ms."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)


CONTEXT = web.AppKey("CONTEXT", Context)
