"""Services of batches over an engine of their own, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from support.batching import NAME, Line, completion_line, jsonl
from tok_client.types import Batch, FileObject
from tok_core import AsyncEngine, EngineConfig
from tok_server.batch.service import BatchService, Limits
from tok_server.batch.store import ENDED, Job
from tok_server.endpoints import Served
from tok_server.ids import new_id
from tok_server.tools.formats import Formats

RUNNING = 16
LINES = [completion_line(number, max_tokens=6, ignore_eos=True) for number in range(80)]
SLOW = [completion_line(number, max_tokens=400, ignore_eos=True) for number in range(150)]


def made_engine(model: Path, **options: int) -> AsyncEngine:
    sizes = {"kv_cache_tokens": 16_384, "max_running": RUNNING, **options}
    config = EngineConfig(model=str(model), device="cpu", **sizes)  # type: ignore[arg-type]
    return AsyncEngine(config, in_process=True)


class Clock:
    """Seconds since 1970, as a test says."""

    def __init__(self) -> None:
        self.now = 1_000_000.5

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(
    directory: Path,
    engine: AsyncEngine,
    now: Callable[[], float] = time.time,
    paused: Callable[[], bool] = lambda: False,
    line: int = 1 << 12,
) -> AsyncIterator[BatchService]:
    served = Served(engine, NAME, Formats())
    service = BatchService(directory, served, Limits(file=1 << 20, line=line), now=now, paused=paused)
    await service.open()
    try:
        yield service
    finally:
        await service.close()


async def begin(service: BatchService, lines: Sequence[Line], hours: int = 24) -> Batch:
    return await begin_with(service, jsonl(lines), hours)


async def begin_with(service: BatchService, data: bytes, hours: int = 24) -> Batch:
    now = int(service.now())
    file = FileObject(id=new_id("file"), bytes=1, created_at=now, filename="f", purpose="batch")
    with service.place.blobs.writing(file.id) as stream:
        stream.write(data)
    await service.ask(lambda store: store.add_file(file))
    batch = Batch(
        id=new_id("batch").replace("-", "_"),
        endpoint="/v1/completions",
        input_file_id=file.id,
        completion_window=f"{hours}h",
        status="validating",
        created_at=now,
        expires_at=now + hours * 3600,
    )
    return await service.create(Job(batch=batch))


async def until(service: BatchService, id: str, true: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + 60
    while not true(found := await service.batch(id)):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)
    return found


async def ended(service: BatchService, id: str) -> Batch:
    return await until(service, id, lambda batch: batch.status in ENDED)


def outputs(service: BatchService, batch: Batch) -> tuple[bytes, bytes]:
    ids = (batch.output_file_id, batch.error_file_id)
    output, errors = (service.place.blobs.path(id).read_bytes() if isinstance(id, str) else b"" for id in ids)
    return output, errors


def completed(batch: Batch) -> int:
    counts = batch.request_counts
    return counts.completed if counts else 0
