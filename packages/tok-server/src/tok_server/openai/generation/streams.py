"""Submit the engine requests of one HTTP request together, and abort them together if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from tok_core import AsyncEngine, Delta, InvalidField, RequestStream
from tok_server.http import tenant_cache_salt
from tok_server.observability import RequestCounts
from tok_server.openai.generation.job import GenerationJob

PROMPTS_PER_TURN = 64  # prompts submitted before other requests get a turn of the event loop
PROMPT_TOKENS_PER_TURN = 1 << 16  # prompt tokens submitted before other requests get a turn
MAX_WAITING_BATCHES = 16  # batches of deltas, of several prompts, queued for writing: more stay in the engine
MAX_GRAMMAR_CHECKS = 256  # grammars of one tenant that may be compiling or waiting to be compiled


class SubmittedStreams:
    """Context manager that submits a job: `async with` gives one stream per prompt. Errors: ApiError, EngineError.

    An exception or a cancellation inside the block aborts all requests. Enter it after `check_grammar`: otherwise an
    invalid grammar is refused in the middle of the stream.

    counts          records what the requests cost
    tenant          owner of the requests
    share_prefixes  whether tenants share cached prefixes
    """

    __slots__ = ("_counts", "_engine", "_job", "_salt", "_streams", "_tenant")

    def __init__(
        self,
        engine: AsyncEngine,
        job: GenerationJob,
        counts: RequestCounts | None = None,
        tenant: str = "",
        *,
        share_prefixes: bool = False,
    ) -> None:
        self._engine = engine
        self._job = job
        self._counts = counts
        self._tenant = tenant
        self._salt = tenant_cache_salt(tenant, job.cache_salt, share_prefixes=share_prefixes)
        self._streams: list[RequestStream] = []

    async def __aenter__(self) -> list[RequestStream]:
        try:
            tokens = 0
            for index, prompt in enumerate(self._job.prompts):
                self._streams.append(self._submit(index, prompt))
                tokens += len(prompt)
                if index % PROMPTS_PER_TURN == PROMPTS_PER_TURN - 1 or tokens > PROMPT_TOKENS_PER_TURN:
                    tokens = 0
                    await asyncio.sleep(0)
        except BaseException:
            self._finish(failed=True)
            raise
        if self._counts is not None:
            self._counts.submitted(self._streams, self._job.samples_per_prompt)
        return self._streams

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(failed=kind is not None)
        if isinstance(error, InvalidField):  # the grammar exceeded its limits in the middle of an answer
            raise self._job.field_error(error, 0) from error

    def _submit(self, index: int, prompt: list[int]) -> RequestStream:
        job, engine = self._job, self._engine
        try:
            return engine.generate(
                prompt,
                job.prompt_params(prompt, engine.info.max_model_len),
                request_id=f"{job.id}-{index}",
                stream=job.stream,
                tenant=self._tenant,
                cache_salt=self._salt,
            )
        except InvalidField as error:
            raise job.field_error(error, index) from error

    def _finish(self, *, failed: bool) -> None:
        if failed:
            for stream in self._streams:
                stream.abort()
            if self._job.params.logprobs is not None:
                asyncio.get_running_loop().run_in_executor(None, _free, self._streams)
        if self._counts is not None:
            self._counts.ended(self._streams)


def _free(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.free()


async def check_grammar(
    engine: AsyncEngine, job: GenerationJob, max_pending: int | None = None, tenant: str = ""
) -> None:
    """Wait until the job's grammar, if it has one, is known to be usable. Errors: ApiError, EngineError.

    max_pending  EngineError is raised if the grammar is unknown and this many others of the tenant are being compiled
    tenant       owner of the request
    """
    if job.params.grammar is None:
        return
    try:
        await engine.check_grammar(job.params.grammar, most=max_pending, tenant=tenant)
    except InvalidField as error:
        raise job.field_error(error, 0) from error


async def merge_streams(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """Yield batches of deltas of all streams as they come, each with its stream's number. Raise the first error."""
    queue: asyncio.Queue[tuple[int, list[Delta] | Exception | None]] = asyncio.Queue(MAX_WAITING_BATCHES)
    tasks = [asyncio.create_task(_pump(stream, index, queue)) for index, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    stream: RequestStream, index: int, queue: asyncio.Queue[tuple[int, list[Delta] | Exception | None]]
) -> None:
    try:
        async for batch in stream.batches():
            await queue.put((index, batch))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
