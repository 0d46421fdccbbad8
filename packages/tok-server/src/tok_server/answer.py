"""How a Job is answered: whole, or as server-sent events while it runs. What the JSON looks like, a Form says."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol
from urllib.parse import quote

from aiohttp import web

from tok_client.types import StopWhenResult, Usage
from tok_core import Delta, EngineDead, RequestOutput, RequestStream
from tok_server.context import Context
from tok_server.counts import COUNTS
from tok_server.deadlines import Deadline
from tok_server.errors import ApiError, limited, of_exception
from tok_server.job import Job
from tok_server.judge import Judge, judged, output_of
from tok_server.streams import MOST_CHECKS, check_grammar, merged, submitted
from tok_server.usage import usage

log = logging.getLogger("tok.server")

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
MOST_WARNED = 1000
FEW = 32  # choices without log-probabilities that are written down at once


class Form(Protocol):
    """The JSON of one endpoint, for one request."""

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """The whole answer. Called in a thread, unless it is a short one."""

    def events(self, prompt: int, delta: Delta) -> bytes:
        """Server-sent events that tell what a sample of prompt number `prompt` gained; b"" if it is nothing.

        Called on the event loop.
        """

    def opening(self) -> bytes:
        """Server-sent events before any token."""

    def closing(self, used: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Server-sent events at the end of all samples."""

    def failed(self, failure: ApiError) -> bytes:
        """The last server-sent event of what could not go on."""


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def check_size(job: Job, context: Context) -> None:
    """Raises ApiError for a job of too many samples (400), or one more than may wait (429)."""
    check_drawn(job, context.settings.max_n)
    context.admit()  # since the request came, others have been read and submitted


def check_drawn(job: Job, most: int) -> None:
    """Raises ApiError (400) for a job that draws more than so many samples of a prompt."""
    if job.drawn > most:
        name = "n" if job.best_of is None else "best_of"
        raise limited("max_n", 400, f"{name} is {job.drawn}; allowed: integers from 1 to {most}", param=name)


def in_time(request: web.Request, context: Context) -> Deadline:
    """`with in_time(…):` raises ApiError (504) once the request has taken all the time it may."""
    return context.deadlines.since(request[COUNTS].started)


async def answer(request: web.Request, context: Context, job: Job, form: Form) -> web.StreamResponse:
    """The response to `request`. Errors before its first byte: ApiError, EngineError."""
    check_size(job, context)
    if job.params.grammar is not None:
        with in_time(request, context):
            await check_grammar(context.engine, job, MOST_CHECKS)
        context.admit()  # meanwhile the engine did not count this one
    headers = ignored_header(context, job.ignored)
    counts = request[COUNTS]
    async with submitted(context.engine, job, counts) as streams:
        if job.stream:
            return await _stream(request, context, job, form, streams, headers)
        with in_time(request, context):
            outputs = [await output_of(stream, job.stop_when) for stream in streams]
    for output in outputs:
        _check_ended(output)
    first = [one.timings.first_token for one in outputs if one.timings.first_token is not None]
    if first:
        context.metrics.began(min(first) - counts.started)
    few = job.params.logprobs is None and len(outputs) * job.drawn <= FEW
    body = form.whole(outputs) if few else await context.work(lambda: form.whole(outputs))
    return web.Response(body=body, content_type="application/json", headers=headers)


def _check_ended(output: RequestOutput) -> None:
    if any(choice.finish_reason == "abort" for choice in output.outputs):
        raise EngineDead("the request was aborted: the engine is stopping")


async def _stream(
    request: web.Request,
    context: Context,
    job: Job,
    form: Form,
    streams: list[RequestStream],
    headers: dict[str, str],
) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS | headers)
    await response.prepare(request)
    try:
        with in_time(request, context):
            last = await _write(response, request, context, job, form, streams)
    except ConnectionError:
        raise
    except Exception as error:
        # The status line is gone; what is left is an event that says what happened, and the end of the stream.
        counts = request[COUNTS]
        failure = of_exception(error, counts.id)
        counts.failed = failure.status
        context.metrics.refuse(failure.limit)
        if failure.status >= 500:
            trace = error if failure.status == 500 else None
            log.error("%s: failed while streaming: %s", counts.id, error, exc_info=trace)
        for stream in streams:
            stream.abort()
        last = form.failed(failure)
    await response.write_eof(last)
    return response


async def _write(
    response: web.StreamResponse,
    request: web.Request,
    context: Context,
    job: Job,
    form: Form,
    streams: list[RequestStream],
) -> bytes:
    """All events but the last ones, which are returned."""
    if data := form.opening():
        await response.write(data)
    tokens = 0

    def events(prompt: int, batch: Sequence[Delta]) -> bytes:
        nonlocal tokens
        gained = _tokens_of(batch)
        if gained and not tokens:
            context.metrics.began(time.monotonic() - request[COUNTS].started)
        tokens += gained
        return b"".join([form.events(prompt, delta) for delta in batch])

    judge = None if job.stop_when is None else Judge(job.stop_when)
    if judge is None and len(streams) == 1:  # most are: each generator on the way takes its time for each token
        while batch := await streams[0].batch():
            if data := events(0, batch):
                await response.write(data)
    else:
        async with aclosing(merged(streams) if judge is None else judged(streams[0], judge)) as batches:
            async for prompt, batch in batches:
                if data := events(prompt, batch):
                    await response.write(data)
    return form.closing(usage(streams, tokens), None if judge is None else judge.result())


def _tokens_of(batch: Sequence[Delta]) -> int:
    """How many tokens samples gained. Errors: EngineDead where one was cut off."""
    gained = 0
    for delta in batch:
        if delta.finish_reason == "abort":
            raise EngineDead("the request was aborted: the engine is stopping")
        gained += len(delta.token_ids)
    return gained


def ignored_header(context: Context, ignored: Sequence[str]) -> dict[str, str]:
    """Tells the client, and once the log, which fields had no effect."""
    if not ignored:
        return {}
    new = [name for name in ignored if name not in context.warned]
    if new and len(context.warned) < MOST_WARNED:
        context.warned.update(new)
        log.warning("ignored: fields that nobody defines: %s", ", ".join(map(repr, new)))
    # Names are the client's own text: quoted, they hold no line break.
    return {"x-tok-ignored": ",".join(quote(name[:64], safe="[]") for name in ignored)}
