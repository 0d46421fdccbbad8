"""How a Job is answered: whole, or as server-sent events while it runs. What the JSON looks like, a Form says."""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from typing import Protocol
from urllib.parse import quote

from aiohttp import web

from tok_client.types import Usage
from tok_core import Delta, EngineDead, RequestOutput, RequestStream
from tok_server.context import Context
from tok_server.errors import of_exception
from tok_server.job import Job
from tok_server.streams import merged, submitted
from tok_server.usage import usage

log = logging.getLogger("tok.server")

REQUEST_ID = web.RequestKey("REQUEST_ID", str)
STARTED = web.RequestKey("STARTED", float)
FAILED = web.RequestKey("FAILED", int)  # status of an error that happened after "200 OK" was sent

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

    def closing(self, used: Usage) -> bytes:
        """The event that carries the usage."""


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


async def answer(request: web.Request, context: Context, job: Job, form: Form) -> web.StreamResponse:
    """The response to `request`. Errors before its first byte: ApiError, EngineError."""
    headers = _ignored_header(context, job)
    async with submitted(context.engine, job) as streams:
        if job.stream:
            return await _stream(request, context, job, form, streams, headers)
        outputs = [await stream.output() for stream in streams]
    for output in outputs:
        _check_ended(output)
    first = [one.timings.first_token for one in outputs if one.timings.first_token is not None]
    if first:
        context.metrics.first_token.observe(min(first) - request[STARTED])
    short = job.params.logprobs is None and len(outputs) * job.params.n <= FEW
    body = await context.work(lambda: form.whole(outputs), short=short)
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
        await _write(response, request, context, job, form, streams)
    except ConnectionError:
        raise
    except Exception as error:
        # The status line is gone; what is left is an event that says what happened, and the end of the stream.
        failure = of_exception(error, request[REQUEST_ID])
        request[FAILED] = failure.status
        if failure.status >= 500:
            log.error("%s: failed while streaming: %s", request[REQUEST_ID], error, exc_info=error)
        for stream in streams:
            stream.abort()
        await response.write(event(failure.body()))
    await response.write_eof()
    return response


async def _write(
    response: web.StreamResponse,
    request: web.Request,
    context: Context,
    job: Job,
    form: Form,
    streams: list[RequestStream],
) -> None:
    tokens = 0
    async with aclosing(merged(streams)) as batches:
        async for prompt, batch in batches:
            if any(delta.finish_reason == "abort" for delta in batch):
                raise EngineDead("the request was aborted: the engine is stopping")
            if not tokens and any(delta.token_ids for delta in batch):
                context.metrics.first_token.observe(time.monotonic() - request[STARTED])
            tokens += sum(len(delta.token_ids) for delta in batch)
            if data := b"".join([form.events(prompt, delta) for delta in batch]):
                await response.write(data)
    if job.include_usage:
        await response.write(form.closing(usage(streams, tokens)))
    await response.write(DONE)


def _ignored_header(context: Context, job: Job) -> dict[str, str]:
    """Tells the client, and once the log, which fields had no effect."""
    if not job.ignored:
        return {}
    new = [name for name in job.ignored if name not in context.warned]
    if new and len(context.warned) < MOST_WARNED:
        context.warned.update(new)
        log.warning("ignored: fields that nobody defines: %s", ", ".join(map(repr, new)))
    # Names are the client's own text: quoted, they hold no line break.
    return {"x-tok-ignored": ",".join(quote(name[:64], safe="[]") for name in job.ignored)}
