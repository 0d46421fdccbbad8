"""Run batch services over engines of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from support.batching import NAME, Line, completion_line, jsonl
from support.patience import PATIENCE
from tok_client.types import UNSET, Batch, FileObject
from tok_core import AsyncEngine, EngineConfig
from tok_server.batch.api.service import BatchLimits, BatchService
from tok_server.batch.storage.clock import Clock
from tok_server.batch.storage.store import ENDED, StoredJob
from tok_server.openai.endpoints import ServedModel
from tok_server.settings import Formats
from tok_server.wire.json import new_id

RUNNING = 16
LINES = [completion_line(number, max_tokens=6, ignore_eos=True) for number in range(80)]
SLOW = [completion_line(number, max_tokens=400, ignore_eos=True) for number in range(150)]


def made_engine(model: Path, **options: int) -> AsyncEngine:
    sizes = {"kv_cache_tokens": 16_384, "max_running": RUNNING, **options}
    config = EngineConfig(model=str(model), device="cpu", **sizes)  # type: ignore[arg-type]
    return AsyncEngine(config, in_process=True)


class FakeTime:
    """Time that a test controls.

    passed  seconds of true time
    ahead   seconds by which the wall clock is ahead of true time
    boot    id of the machine's boot
    """

    def __init__(self) -> None:
        self.passed = 1000.0
        self.ahead = 0.0
        self.boot = "first boot"

    def wall(self) -> float:
        return 1_000_000.5 + self.passed + self.ahead

    def clock(self) -> Clock:
        """Return a clock as a process that starts now has it."""
        return Clock(self.wall, lambda: self.passed, lambda: self.boot)


@asynccontextmanager
async def opened(
    directory: Path,
    engine: AsyncEngine,
    clock: Clock | None = None,
    paused: Callable[[], bool] = lambda: False,
    line: int = 1 << 12,
    quota: int | None = None,
) -> AsyncIterator[BatchService]:
    served = ServedModel(engine, (NAME,), Formats())
    service = BatchService(
        directory, served, BatchLimits(file=1 << 20, line=line, quota=quota), clock=clock, paused=paused
    )
    await service.open()
    try:
        yield service
    finally:
        await service.close()


async def begin(service: BatchService, lines: Sequence[Line], hours: int = 24) -> Batch:
    return await begin_with(service, jsonl(lines), hours)


async def begin_with(service: BatchService, data: bytes, hours: int = 24) -> Batch:
    now = service.now()
    file = await add_file(service, data)
    batch = new_batch(file.id, now, hours)
    return await service.create(StoredJob(batch=batch, deadline=service.clock.now() + hours * 3600))


def new_batch(input: str, now: int = 1, hours: int = 24) -> Batch:
    return Batch(
        id=new_id("batch").replace("-", "_"),
        endpoint="/v1/completions",
        input_file_id=input,
        completion_window=f"{hours}h",
        status="validating",
        created_at=now,
        expires_at=now + hours * 3600,
    )


async def add_file(service: BatchService, data: bytes, seconds: int | None = None) -> FileObject:
    """Add an uploaded file that expires after `seconds`."""
    now = service.now()
    expires = UNSET if seconds is None else now + seconds
    file = FileObject(
        id=new_id("file"), bytes=len(data), created_at=now, filename="f", purpose="batch", expires_at=expires
    )
    with service.data_directory.blobs.writing(file.id) as stream:
        stream.write(data)
    await service.add_file(file, seconds=seconds)
    return file


async def until(service: BatchService, id: str, true: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + PATIENCE
    while not true(found := await service.batch(id)):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)
    return found


async def ended(service: BatchService, id: str) -> Batch:
    return await until(service, id, lambda batch: batch.status in ENDED)


def outputs(service: BatchService, batch: Batch) -> tuple[bytes, bytes]:
    ids = (batch.output_file_id, batch.error_file_id)
    output, errors = (service.data_directory.blobs.path(id).read_bytes() if isinstance(id, str) else b"" for id in ids)
    return output, errors


def completed(batch: Batch) -> int:
    counts = batch.request_counts
    return counts.completed if counts else 0
