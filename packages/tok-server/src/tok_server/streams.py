"""The engine requests behind one HTTP request: submitted together, and aborted together unless all end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from tok_core import AsyncEngine, Delta, InvalidField, RequestStream
from tok_server.job import Job

BATCH = 64  # prompts submitted before other requests get their turn


@asynccontextmanager
async def submitted(engine: AsyncEngine, job: Job) -> AsyncIterator[list[RequestStream]]:
    """A stream a prompt. Leaving by an exception or cancelled aborts them all. Errors: ApiError, EngineError."""
    streams: list[RequestStream] = []
    try:
        for index, prompt in enumerate(job.prompts):
            streams.append(_submit(engine, job, index, prompt))
            if index % BATCH == BATCH - 1:
                await asyncio.sleep(0)
        yield streams
    except BaseException:
        for stream in streams:
            stream.abort()
        raise


def _submit(engine: AsyncEngine, job: Job, index: int, prompt: list[int]) -> RequestStream:
    try:
        params = job.params_of(prompt, engine.info.max_model_len)
        return engine.generate(prompt, params, request_id=f"{job.id}-{index}", stream=job.stream)
    except InvalidField as error:
        raise job.refused(error, index) from error


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """Deltas of all streams as they come, each batch with its stream's number. The first error of any ends it."""
    if len(streams) == 1:
        async for batch in streams[0].batches():
            yield 0, batch
        return
    async with aclosing(_interleaved(streams)) as batches:
        async for found in batches:
            yield found


async def _interleaved(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, list[Delta]]]:
    queue: asyncio.Queue[tuple[int, list[Delta] | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, index, queue)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield index, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    stream: RequestStream, index: int, queue: asyncio.Queue[tuple[int, list[Delta] | Exception | None]]
) -> None:
    try:
        async for batch in stream.batches():
            queue.put_nowait((index, batch))
        queue.put_nowait((index, None))
    except Exception as error:
        queue.put_nowait((index, error))
