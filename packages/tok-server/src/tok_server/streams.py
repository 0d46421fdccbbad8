"""The engine requests behind one HTTP request: submitted together, and aborted together unless all end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from tok_core import AsyncEngine, Delta, InvalidField, RequestStream
from tok_server.counts import Counts
from tok_server.job import Job

BATCH = 64  # prompts submitted before other requests get their turn
MOST_CHECKS = 256  # grammars that may be compiled at once, or wait for that, where somebody waits for the answer


class submitted:
    """`async with submitted(…) as streams:` gives a stream a prompt. Errors: ApiError, EngineError.

    Leaving by an exception or cancelled aborts them all. To be entered after `check_grammar`: a grammar that is refused
    later is, in the midst of the stream.

    counts  is told what they have cost
    """

    __slots__ = ("_counts", "_engine", "_job", "_streams")

    def __init__(self, engine: AsyncEngine, job: Job, counts: Counts | None = None) -> None:
        self._engine = engine
        self._job = job
        self._counts = counts
        self._streams: list[RequestStream] = []

    async def __aenter__(self) -> list[RequestStream]:
        try:
            for index, prompt in enumerate(self._job.prompts):
                self._streams.append(_submit(self._engine, self._job, index, prompt))
                if index % BATCH == BATCH - 1:
                    await asyncio.sleep(0)
        except BaseException:
            self._leave(failed=True)
            raise
        if self._counts is not None:
            self._counts.submitted(self._streams, self._job.drawn)
        return self._streams

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(failed=kind is not None)

    def _leave(self, *, failed: bool) -> None:
        if failed:
            for stream in self._streams:
                stream.abort()
        if self._counts is not None:
            self._counts.ended(self._streams)


async def check_grammar(engine: AsyncEngine, job: Job, most: int | None = None) -> None:
    """Waits until it is known that the job's grammar, if it has one, can be followed. Errors: ApiError, EngineError.

    most  EngineError where it is unknown and so many others are being compiled
    """
    if job.params.grammar is None:
        return
    try:
        await engine.check_grammar(job.params.grammar, most=most)
    except InvalidField as error:
        raise job.refused(error, 0) from error


def _submit(engine: AsyncEngine, job: Job, index: int, prompt: list[int]) -> RequestStream:
    try:
        params = job.params_of(prompt, engine.info.max_model_len)
        return engine.generate(prompt, params, request_id=f"{job.id}-{index}", stream=job.stream)
    except InvalidField as error:
        raise job.refused(error, index) from error


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """Deltas of all streams as they come, each batch with its stream's number. The first error of any ends it."""
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
