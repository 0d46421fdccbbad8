"""Answer a Job with one JSON body, or with server-sent events while it runs. A Form writes the JSON."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from urllib.parse import quote

from aiohttp import web

from tok_core import Delta, EngineDead, InvalidField, RequestOutput, RequestStream
from tok_server.http import Context, Deadline
from tok_server.observability import COUNTS
from tok_server.openai.generation.job import (
    MAX_LOGPROBS,
    GenerationJob,
    check_logprobs,
    check_priority,
    check_sample_count,
)
from tok_server.openai.generation.serializer import AnswerSerializer, total_usage
from tok_server.openai.generation.stop_when import StopWhenEvaluator, evaluate_stream, wait_for_output
from tok_server.openai.generation.streams import MAX_GRAMMAR_CHECKS, SubmittedStreams, check_grammar, merge_streams
from tok_server.wire import from_exception, limited, next_piece

log = logging.getLogger("tok.server")

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
MAX_WARNED_FIELDS = 1000  # names of unknown fields after which the log mentions no further ones
MAX_DELTAS_PER_WRITE = 256  # deltas whose events are encoded and written together: other requests run in between
MAX_CHOICES_AT_ONCE = 32  # choices without log-probabilities up to which the event loop encodes an answer itself
MAX_LOOP_BYTES = 1 << 16  # estimated bytes up to which the event loop encodes an answer itself
MIN_PIECEWISE_BYTES = 1 << 20  # estimated bytes beyond which an answer is written in pieces
TOKEN_BYTES, LOGPROB_BYTES, CHOICE_BYTES = 8, 64, 64  # estimated bytes of each in an answer


def check_request(job: GenerationJob, context: Context, max_logprobs: int | None, tenant: str) -> None:
    """Raise ApiError: 400 for too many samples or log-probabilities or a forbidden priority; else as `Context.admit`.

    max_logprobs  largest number of log-probabilities of the answer; None: no limit
    """
    check_sample_count(job, context.settings.max_n)
    check_priority(job, context.settings.min_client_priority)
    check_logprobs(job, context.engine.info.max_model_len, max_logprobs)
    context.admit(tenant)  # while this request was parsed, others may have been submitted


def request_deadline(request: web.Request, context: Context) -> Deadline:
    """Return a context manager that raises ApiError (504) once the request has exceeded its time limit."""
    return context.deadlines.start(request[COUNTS].started)


async def answer(
    request: web.Request, context: Context, job: GenerationJob, serializer: AnswerSerializer
) -> web.StreamResponse:
    """Run the job and return the response to `request`. Errors before its first byte: ApiError, EngineError."""
    max_logprobs = serializer.max_logprobs if serializer.max_logprobs or job.stream else MAX_LOGPROBS
    check_request(job, context, max_logprobs, request[COUNTS].tenant)
    if job.params.grammar is not None:
        with request_deadline(request, context):
            await check_grammar(context.engine, job, MAX_GRAMMAR_CHECKS, request[COUNTS].tenant)
        context.admit(request[COUNTS].tenant)  # the engine did not count this request during the check
    headers = ignored_header(context, job.ignored)
    counts = request[COUNTS]
    share_prefixes = context.settings.share_prefixes
    with context.track_prompts(counts.tenant, len(job.prompts)):
        async with SubmittedStreams(
            context.engine, job, counts, counts.tenant, share_prefixes=share_prefixes
        ) as streams:
            if job.stream:
                return await _stream(request, context, job, serializer, streams, headers)
            with request_deadline(request, context):
                outputs = [await wait_for_output(stream, job.stop_when) for stream in streams]
    for output in outputs:
        _check_not_aborted(output)
    first = [one.timings.first_token for one in outputs if one.timings.first_token is not None]
    if first:
        context.metrics.began(min(first) - counts.started)
    size = estimate_bytes(job, outputs)
    if size > MIN_PIECEWISE_BYTES:
        return await write_pieces(request, context, serializer.encode_pieces(outputs), headers)
    on_loop = (
        job.params.logprobs is None
        and len(outputs) * job.samples_per_prompt <= MAX_CHOICES_AT_ONCE
        and size <= MAX_LOOP_BYTES
    )
    body = (
        serializer.encode_answer(outputs)
        if on_loop
        else await context.run_in_thread(lambda: serializer.encode_answer(outputs))
    )
    return web.Response(body=body, content_type="application/json", headers=headers)


def estimate_bytes(job: GenerationJob, outputs: Sequence[RequestOutput]) -> int:
    """Estimate the bytes of the whole answer.

    If `max_tokens` alone keeps the answer below the relevant limit, return that bound without counting tokens.
    """
    top, prompt_top, max_tokens = job.params.logprobs, job.prompt_logprobs, job.params.max_tokens
    token_bytes = TOKEN_BYTES + (0 if top is None else LOGPROB_BYTES * (1 + top))
    prompt_bytes = (token_bytes if job.echo else 0) + (0 if prompt_top is None else LOGPROB_BYTES * (1 + prompt_top))
    choices = len(outputs) * job.samples_per_prompt
    if max_tokens is not None and not prompt_bytes:
        max_bytes = choices * (CHOICE_BYTES + token_bytes * max_tokens)
        if max_bytes <= (MAX_LOOP_BYTES if choices <= MAX_CHOICES_AT_ONCE else MIN_PIECEWISE_BYTES):
            return max_bytes
    return sum(
        CHOICE_BYTES + prompt_bytes * len(output.prompt_token_ids) + token_bytes * len(one.token_ids)
        for output in outputs
        for one in output.outputs
    )


async def write_pieces(
    request: web.Request, context: Context, pieces: Iterator[bytes], headers: dict[str, str]
) -> web.StreamResponse:
    """Answer with a JSON body of any size. Each piece is made once the client has taken the previous one."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"} | headers)
    await response.prepare(request)
    try:
        while piece := await context.run_in_thread(lambda: next_piece(pieces)):
            await response.write(piece)
    except ConnectionError:
        raise
    except Exception as error:
        # The status and the beginning have been sent: only an aborted connection can signal the failure.
        counts = request[COUNTS]
        log.error("%s: failed while answering: %s", counts.id, error, exc_info=error)
        counts.failed = 500
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionError("the response failed after its first bytes") from error
    await response.write_eof()
    return response


def _check_not_aborted(output: RequestOutput) -> None:
    if any(choice.finish_reason == "abort" for choice in output.outputs):
        raise EngineDead("the request was aborted: the engine is stopping")


async def _stream(
    request: web.Request,
    context: Context,
    job: GenerationJob,
    serializer: AnswerSerializer,
    streams: list[RequestStream],
    headers: dict[str, str],
) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS | headers)
    await response.prepare(request)
    try:
        with request_deadline(request, context), UnreadLimit(streams, context.settings.max_unread) as unread_limit:
            last = await _write_events(response, request, context, job, serializer, streams, unread_limit)
    except ConnectionError:
        raise
    except Exception as error:
        # The status line has been sent: report the error as an event, then end the stream.
        counts = request[COUNTS]
        failure = job.field_error(error, 0) if isinstance(error, InvalidField) else from_exception(error, counts.id)
        counts.failed = failure.status
        context.metrics.refuse(failure.limit)
        if failure.status >= 500:
            trace = error if failure.status == 500 else None
            log.error("%s: failed while streaming: %s", counts.id, error, exc_info=trace)
        for stream in streams:
            stream.abort()
        last = serializer.encode_failure(failure)
    await response.write_eof(last)
    return response


async def _write_events(
    response: web.StreamResponse,
    request: web.Request,
    context: Context,
    job: GenerationJob,
    serializer: AnswerSerializer,
    streams: list[RequestStream],
    unread_limit: UnreadLimit,
) -> bytes:
    """Write all events except the last ones, and return those."""
    if data := serializer.encode_opening():
        await response.write(data)
    tokens = 0

    def events(prompt: int, batch: Sequence[Delta]) -> bytes:
        nonlocal tokens
        gained = _count_tokens(batch)
        if gained and not tokens:
            context.metrics.began(time.monotonic() - request[COUNTS].started)
        tokens += gained
        return b"".join([serializer.encode_delta(prompt, delta) for delta in batch])

    async def send(prompt: int, batch: Sequence[Delta]) -> None:
        for start in range(0, len(batch), MAX_DELTAS_PER_WRITE):
            part = batch[start : start + MAX_DELTAS_PER_WRITE]
            if (
                data := await context.run_in_thread(partial(events, prompt, part))
                if slow_events
                else events(prompt, part)
            ):
                unread_limit.sending = True
                await response.write(data)
                unread_limit.sending = False
            if len(batch) > MAX_DELTAS_PER_WRITE:
                await asyncio.sleep(0)

    # Events that repeat all log-probabilities take long to encode.
    slow_events = serializer.max_logprobs is not None and job.params.logprobs is not None
    evaluator = None if job.stop_when is None else StopWhenEvaluator(job.stop_when)
    if evaluator is None and len(streams) == 1:  # the common case: each generator in between costs time per token
        while batch := await streams[0].batch():
            if slow_events or len(batch) > MAX_DELTAS_PER_WRITE:
                await send(0, batch)
            elif data := events(0, batch):
                unread_limit.sending = True
                await response.write(data)
                unread_limit.sending = False
    else:
        async with aclosing(
            merge_streams(streams) if evaluator is None else evaluate_stream(streams[0], evaluator)
        ) as batches:
            async for prompt, batch in batches:
                await send(prompt, batch)
    ending = partial(
        serializer.encode_closing, total_usage(streams, tokens), None if evaluator is None else evaluator.result()
    )
    return await context.run_in_thread(ending) if slow_events else ending()


class UnreadLimit:
    """Context manager that raises ApiError (408) if a client leaves more than `max_bytes` bytes of its streams unread.

    It cancels the task that enters it if too much is unread while that task waits for the client. While the task is
    busy otherwise, the client is not at fault; tokens that arrive meanwhile are written together.

    sending  the task is writing: it waits for the client to read, or is about to
    """

    def __init__(self, streams: Sequence[RequestStream], max_bytes: int) -> None:
        self.sending = False
        self._max_bytes = max_bytes
        self._exceeded = False
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancel_requests = task, task.cancelling()
        for stream in streams:  # the other half is for deltas already read and being written
            stream.bound(max_bytes // (2 * len(streams)), self._on_overflow)

    def __enter__(self) -> UnreadLimit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sending = False
        if self._exceeded and self._task.uncancel() <= self._cancel_requests and kind is asyncio.CancelledError:
            message = f"the client has left more than {self._max_bytes} bytes of its stream unread"
            raise limited("max_unread", 408, message, code="unread_stream") from error

    def _on_overflow(self) -> None:
        if self.sending and not self._exceeded:
            self._exceeded = True
            self._task.cancel()


def _count_tokens(batch: Sequence[Delta]) -> int:
    """Return the number of tokens in the batch. Raise EngineDead if a sample was aborted."""
    gained = 0
    for delta in batch:
        if delta.finish_reason == "abort":
            raise EngineDead("the request was aborted: the engine is stopping")
        gained += len(delta.token_ids)
    return gained


def ignored_header(context: Context, ignored: Sequence[str]) -> dict[str, str]:
    """Return the header that names fields without effect; log each new name once."""
    if not ignored:
        return {}
    new = [name for name in ignored if name not in context.warned_fields]
    if new and len(context.warned_fields) < MAX_WARNED_FIELDS:
        context.warned_fields.update(new)
        log.warning("ignored unknown request fields: %s", ", ".join(map(repr, new)))
    # The names come from the client: quoting removes line breaks.
    return {"x-tok-ignored": ",".join(quote(name[:64], safe="[]") for name in ignored)}
