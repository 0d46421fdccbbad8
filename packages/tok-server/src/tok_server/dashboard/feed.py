"""Feed: sample the engine's statistics once per second, encoded once for all viewers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from tok_server.dashboard.history import COLUMNS, LATENCY, History
from tok_server.http import Context
from tok_server.observability import EngineStats

if TYPE_CHECKING:
    from tok_core.replicas import Health

SAMPLE_SECONDS = 1.0  # seconds between samples
Row = list[float | None]


class ReplicaSample(msgspec.Struct):
    """State of one replica: a word, a sentence, and the number of its restarts."""

    state: str
    detail: str
    restarts: int


class Sample(msgspec.Struct, omit_defaults=True):
    """Statistics of one second.

    device   device, dtype and kernel backend; "" before the engine has started
    row      a row of `History`; None for cells without a value
    tens     the ten-second row, if one has just been completed
    latency  `LATENCY` of the last hour, in seconds
    ended    number of requests in `latency`
    """

    state: str
    detail: str
    device: str
    uptime: float
    replicas: list[ReplicaSample]
    row: Row
    latency: Row
    ended: int
    tens: Row | None = None


class Opening(msgspec.Struct):
    """First event of a viewer: the model, the names of the columns, and all rows so far."""

    model: str
    version: str
    columns: tuple[str, ...]
    latency_columns: tuple[str, ...]
    seconds: list[Row]
    tens: list[Row]
    sample: Sample


class Feed:
    """The history of one server, and the events for its viewers."""

    def __init__(self, context: Context, stats: Callable[[], EngineStats]) -> None:
        self._context = context
        self._stats = stats
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
        context.latencies.tick()
        full = self._history.add(stats, context.latencies.recent(), time=time.time(), clock=now)
        self._latest = Sample(
            state=context.state,
            detail=context.engine.health().detail,
            device=_device(context),
            uptime=round(now - self._started, 1),
            replicas=_replicas(context.engine.health(), stats),
            row=_row(self._history.seconds.rows()[-1].tolist()),
            latency=_row(context.latencies.hour()),
            ended=context.latencies.ended(),
            tens=_row(self._history.tens.rows()[-1].tolist()) if full else None,
        )
        self._sample_event = self._opening_event = b""
        self._wake()

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
            columns=COLUMNS,
            latency_columns=LATENCY,
            seconds=[_row(one) for one in self._history.seconds.rows().tolist()],
            tens=[_row(one) for one in self._history.tens.rows().tolist()],
            sample=self._latest,
        )


def _device(context: Context) -> str:
    if not context.ready:
        return ""
    info = context.engine.info
    return f"{info.device} · {info.dtype} · {info.backend}"


def _replicas(health: Health, stats: EngineStats) -> list[ReplicaSample]:
    restarts = [int(one.get("restarts", 0)) for one in stats.replicas] or [0] * len(health.replicas)
    # A closed engine reports no replicas any more, but still their counters.
    return [ReplicaSample(one.state, one.detail, count) for one, count in zip(health.replicas, restarts, strict=False)]


def _row(cells: list[float]) -> Row:
    return [None if math.isnan(cell) else round(cell, 4) for cell in cells]


def _event(name: str, data: Opening | Sample) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
