"""Feed: sample the engine's statistics once per second, encoded once for all viewers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from tok_server.batch import BatchStats
from tok_server.dashboard.history import COLUMNS, LATENCY, SERVER_COLUMNS, History
from tok_server.http import Context
from tok_server.observability import EngineStats

if TYPE_CHECKING:
    from tok_core.replicas import Health

SAMPLE_SECONDS = 1.0  # seconds between samples
CLIENT_LEFT = 499  # status of requests whose clients disconnected
Row = list[float | None]


class ReplicaSample(msgspec.Struct):
    """State of one replica: a word and a sentence, and its restarts and preempted samples since the start."""

    state: str
    detail: str
    restarts: int
    preemptions: int


class Sizes(msgspec.Struct):
    """Sizes of the engine: longest request, KV cache and running samples per replica, in tokens and samples."""

    context: int
    cache: int
    samples: int


class Sample(msgspec.Struct, omit_defaults=True):
    """Statistics of one second.

    device   device, dtype and kernel backend; "" before the engine has started
    row      a row of `History`; None for cells without a value
    tens     the ten-second row, if one has just been completed
    latency  `LATENCY` of the last two minutes and of the last hour, in seconds
    ended    number of requests in each of these
    errors   answers of the API since the start, by status from 400
    refused  refused requests and connections since the start, by limit
    sizes    None before the engine has started
    batches  None without files and batches
    """

    state: str
    detail: str
    device: str
    uptime: float
    replicas: list[ReplicaSample]
    row: Row
    latency: tuple[Row, Row]
    ended: tuple[int, int]
    errors: dict[int, int]
    refused: dict[str, int]
    sizes: Sizes | None = None
    batches: BatchStats | None = None
    tens: Row | None = None


class Opening(msgspec.Struct):
    """First event of a viewer: the model, whether clients need a key, the names of the columns, and all rows so far."""

    model: str
    version: str
    keyed: bool
    columns: tuple[str, ...]
    latency_columns: tuple[str, ...]
    server_columns: tuple[str, ...]
    seconds: list[Row]
    tens: list[Row]
    sample: Sample


class Feed:
    """The history of one server, and the events for its viewers."""

    def __init__(
        self, context: Context, stats: Callable[[], EngineStats], batches: Callable[[], BatchStats | None]
    ) -> None:
        self._context = context
        self._stats = stats
        self._batches = batches
        self._totals = (0, 0, 0)  # of `_error_totals`, at the last tick
        self._history = History(len(context.engine.health().replicas))
        self._started = time.monotonic()
        self._ticked = asyncio.Event()
        self._latest: Sample | None = None
        self._sample_event = self._opening_event = b""
        self.closed = False

    async def run(self) -> None:
        """Take a sample every second until cancelled."""
        next_tick = time.monotonic()
        while True:
            self.tick()
            next_tick = max(next_tick + SAMPLE_SECONDS, time.monotonic())  # do not catch up after a pause
            await asyncio.sleep(next_tick - time.monotonic())

    def tick(self) -> None:
        """Take the sample of the second that ends now, and wake the viewers."""
        context, stats, now = self._context, self._stats(), time.monotonic()
        batches = self._batches()
        context.latencies.tick()
        minutes, hour = context.latencies.minutes(), context.latencies.hour()
        server = [*self._new_errors(), 0 if batches is None else sum(batches.lines.values())]
        full = self._history.add(stats, context.latencies.recent(), server, time=time.time(), clock=now)
        self._latest = Sample(
            state=context.state,
            detail=context.engine.health().detail,
            device=_device(context),
            uptime=round(now - self._started, 1),
            replicas=_replicas(context.engine.health(), stats),
            row=_row(self._history.seconds[-1].tolist()),
            latency=(_row(minutes.percentiles), _row(hour.percentiles)),
            ended=(minutes.ended, hour.ended),
            errors=dict(context.metrics.errors),
            refused=dict(context.metrics.refusals),
            sizes=_sizes(context),
            batches=batches,
            tens=_row(self._history.tens[-1].tolist()) if full else None,
        )
        self._sample_event = self._opening_event = b""
        self._wake()

    def _new_errors(self) -> list[int]:
        """Return the server errors, client errors and refusals since the last call."""
        before, self._totals = self._totals, _error_totals(self._context)
        return [now - then for now, then in zip(self._totals, before, strict=True)]

    def close(self) -> None:
        """Disconnect the viewers."""
        self.closed = True
        self._wake()

    async def wait_for_tick(self) -> None:
        """Wait for the next tick, or until the feed is closed."""
        if not self.closed:
            await self._ticked.wait()

    @property
    def ended(self) -> bool:
        """Return whether viewers must disconnect: they would keep a draining server from stopping."""
        return self.closed or self._context.draining

    def opening(self) -> bytes:
        """Return the first event of a viewer."""
        self._opening_event = self._opening_event or _event("opening", self._make_opening())
        return self._opening_event

    def sample(self) -> bytes:
        """Return the event of the latest tick."""
        assert self._latest is not None
        self._sample_event = self._sample_event or _event("sample", self._latest)
        return self._sample_event

    def _wake(self) -> None:
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    def _make_opening(self) -> Opening:
        assert self._latest is not None
        return Opening(
            model=self._context.settings.model_name,
            version=version("tok-server"),
            keyed=bool(self._context.settings.api_keys),
            columns=COLUMNS,
            latency_columns=LATENCY,
            server_columns=SERVER_COLUMNS,
            seconds=[_row(one.tolist()) for one in self._history.seconds],
            tens=[_row(one.tolist()) for one in self._history.tens],
            sample=self._latest,
        )


def _device(context: Context) -> str:
    if not context.ready:
        return ""
    info = context.engine.info
    return f"{info.device} · {info.dtype} · {info.backend}"


def _sizes(context: Context) -> Sizes | None:
    if not context.ready:
        return None
    info = context.engine.info
    return Sizes(info.max_model_len, info.kv_cache_tokens, info.max_running)


def _error_totals(context: Context) -> tuple[int, int, int]:
    errors = context.metrics.errors
    by_server = sum(count for status, count in errors.items() if status >= 500)
    return by_server, errors.total() - by_server - errors[CLIENT_LEFT], context.metrics.refusals.total()


def _replicas(health: Health, stats: EngineStats) -> list[ReplicaSample]:
    counted = stats.replicas or [{}] * len(health.replicas)
    # A closed engine reports no replicas any more, but still their counters.
    return [
        ReplicaSample(one.state, one.detail, int(counts.get("restarts", 0)), int(counts.get("preemptions", 0)))
        for one, counts in zip(health.replicas, counted, strict=False)
    ]


def _row(cells: list[float]) -> Row:
    return [None if math.isnan(cell) else round(cell, 4) for cell in cells]


def _event(name: str, data: Opening | Sample) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
