"""Answer a generation request: with one JSON body, or with server-sent events while the engine generates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import quote

from aiohttp import web

from tok_core import AsyncEngine, Delta, EngineDead, InvalidField, RequestOutput, RequestStream
from tok_server.http import CONTEXT, Context, UnreadLimit, deadline, read_body
from tok_server.observability import COUNTS
from tok_server.openai.generation.job import (
    MAX_GRAMMAR_CHECKS,
    MAX_LOGPROBS,
    GenerationJob,
    SubmittedStreams,
    check_grammar,
    check_limits,
    merge_streams,
)
from tok_server.openai.generation.serializer import AnswerSerializer, EventSerializer, total_usage
from tok_server.openai.generation.stop_when import StopWhenEvaluator, evaluate_stream, wait_for_output
from tok_server.settings import Formats
from tok_server.wire import from_exception, next_piece, slices

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
SHOWING_ABORTS = frozenset({"/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"})
"""Endpoints whose finish_reason may be "abort"."""
MIN_PIECEWISE_BYTES = 1 << 20  # estimated bytes beyond which an answer is written in pieces
TOKEN_BYTES, LOGPROB_BYTES, CHOICE_BYTES = 8, 64, 64  # estimated bytes of each in an answer

Parse = Callable[[bytes, AsyncEngine, tuple[str, ...], Formats], tuple[GenerationJob, AnswerSerializer]]
"""Parser of an endpoint's bodies, given the engine, the model's names and its formats. Errors: ApiError."""


async def answer_request(
    request: web.Request, parse: Parse, is_quick: Callable[[bytes], bool] = lambda _: False
) -> web.StreamResponse:
    """Answer a POST request. `is_quick`: whether the event loop may parse a body itself, without a thread."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    parse_body = partial(parse, body, context.engine, context.settings.model_names, context.settings.formats)
    job, serializer = parse_body() if is_quick(body) else await context.run_in_thread(parse_body)
    return await answer(request, context, job, serializer)


async def answer(
    request: web.Request, context: Context, job: GenerationJob, serializer: AnswerSerializer
) -> web.StreamResponse:
    """Run the job and return the response to `request`. Errors before its first byte: ApiError, EngineError."""
    counts, settings = request[COUNTS], context.settings
    max_logprobs = serializer.max_logprobs if serializer.max_logprobs or job.stream else MAX_LOGPROBS
    check_limits(job, settings.max_n, settings.min_client_priority, context.engine.info.max_model_len, max_logprobs)
    context.admit(counts.tenant)  # while this request was parsed, others may have been submitted
    if job.params.grammar is not None:
        async with request_deadline(request, context):
            await check_grammar(context.engine, job, MAX_GRAMMAR_CHECKS, counts.tenant)
        context.admit(counts.tenant)  # the engine did not count this request during the check
    headers = ignored_header(context, job.ignored)
    submission = SubmittedStreams(context.engine, job, counts, counts.tenant, share_prefixes=settings.share_prefixes)
    with context.track_prompts(counts.tenant, len(job.prompts)):
        async with submission as streams:
            if job.stream:
                return await send_events(request, context, job, serializer, streams, headers)
            async with request_deadline(request, context):
                outputs = [await wait_for_output(stream, job.stop_when) for stream in streams]
    for output in outputs:
        if any(choice.finish_reason == "abort" for choice in output.outputs) and not _shows_aborts(request, context):
            raise _aborted()
    if first := [one.timings.first_token for one in outputs if one.timings.first_token is not None]:
        context.metrics.began(min(first) - counts.started)
    size = estimate_bytes(job, outputs)
    if size > MIN_PIECEWISE_BYTES:
        try:
            return await write_pieces(request, context, serializer.encode_pieces(outputs), headers)
        finally:
            submission.free()  # what a client that has left did not read
    is_short = len(outputs) * job.samples_per_prompt <= MAX_CHOICES_AT_ONCE and size <= MAX_LOOP_BYTES
    encode = partial(serializer.encode_answer, outputs)
    body = encode() if is_short and job.params.logprobs is None else await context.run_in_thread(encode)
    return web.Response(body=body, content_type="application/json", headers=headers)


async def send_events(
    request: web.Request,
    context: Context,
    job: GenerationJob,
    serializer: EventSerializer,
    streams: list[RequestStream],
    headers: dict[str, str],
) -> web.StreamResponse:
    """Answer with server-sent events as the engine generates. An error ends the stream with an event."""
    return await _StreamedAnswer(request, context, job, serializer, streams).send(headers)


def request_deadline(request: web.Request, context: Context) -> AbstractAsyncContextManager[None]:
    """Return a context manager that raises ApiError (504) once the request has exceeded its time limit."""
    return deadline(request[COUNTS].started, context.settings.request_timeout)


def ignored_header(context: Context, ignored: Sequence[str]) -> dict[str, str]:
    """Return the header that names fields without effect; log each new name once."""
    if not ignored:
        return {}
    new = [name for name in ignored if name not in context.warned_fields]
    if new and len(context.warned_fields) < MAX_WARNED_FIELDS:
        context.warned_fields.update(new)
        log.warning("ignored request fields: %s", ", ".join(map(repr, new)))
    # The names come from the client: quoting removes line breaks.
    return {"x-tok-ignored": ",".join(quote(name[:64], safe="[]") for name in ignored)}


def _shows_aborts(request: web.Request, context: Context) -> bool:
    """Return whether aborted samples are answered with the tokens so far: a trainer has aborted them."""
    return context.settings.enable_rl and request.path in SHOWING_ABORTS


def _aborted() -> EngineDead:
    return EngineDead("the request was aborted: the engine is stopping")


def estimate_bytes(job: GenerationJob, outputs: Sequence[RequestOutput]) -> int:
    """Estimate the bytes of the whole answer.

    If `max_tokens` alone keeps the answer below the relevant limit, return that bound without counting tokens.
    """
    top, prompt_top, max_tokens = job.params.logprobs, job.prompt_logprobs, job.params.max_tokens
    token_bytes = TOKEN_BYTES + (0 if top is None else LOGPROB_BYTES * (1 + top))
    prompt_bytes = (token_bytes if job.echo else 0) + (0 if prompt_top is None else LOGPROB_BYTES * (1 + prompt_top))
    prompt_bytes += TOKEN_BYTES if job.return_token_ids else 0
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


@dataclass(slots=True)
class _StreamedAnswer:
    """The answer to one request as server-sent events.

    tokens  tokens sent so far
    latest  by prompt, the time of its latest tokens
    """

    request: web.Request
    context: Context
    job: GenerationJob
    serializer: EventSerializer
    streams: list[RequestStream]
    tokens: int = 0
    latest: dict[int, float] = field(default_factory=dict)

    async def send(self, headers: dict[str, str]) -> web.StreamResponse:
        """Send the events as the engine generates them. An error ends the stream with an event."""
        response = web.StreamResponse(headers=STREAM_HEADERS | headers)
        await response.prepare(self.request)
        unread_limit = UnreadLimit(self.streams, self.context.settings.max_unread)
        try:
            async with request_deadline(self.request, self.context):
                with unread_limit:
                    last = await self._write_events(response, unread_limit)
        except ConnectionError:
            raise
        except Exception as error:  # the status line has been sent
            last = self._fail(error)
        await response.write_eof(last)
        return response

    async def _write_events(self, response: web.StreamResponse, unread_limit: UnreadLimit) -> bytes:
        """Write all events except the last ones, and return those."""
        job, streams = self.job, self.streams
        # Events that repeat all log-probabilities take long to encode.
        in_thread = self.serializer.max_logprobs is not None and job.params.logprobs is not None

        async def write(prompt: int, batch: list[Delta]) -> None:
            self._observe_latency(prompt, batch)
            for part in [batch] if len(batch) <= MAX_DELTAS_PER_WRITE else slices(batch, MAX_DELTAS_PER_WRITE):
                encode = partial(self._encode, prompt, part)
                if data := await self.context.run_in_thread(encode) if in_thread else encode():
                    unread_limit.sending = True
                    await response.write(data)
                    unread_limit.sending = False
                if part is not batch:
                    await asyncio.sleep(0)

        if data := self.serializer.encode_opening():
            await response.write(data)
        evaluator = None if job.stop_when is None else StopWhenEvaluator(job.stop_when)
        if evaluator is None and len(streams) == 1:  # the common case: a generator in between costs time per token
            while batch := await streams[0].batch():
                await write(0, batch)
        else:
            merged = merge_streams(streams) if evaluator is None else evaluate_stream(streams[0], evaluator)
            async with aclosing(merged) as batches:
                async for prompt, batch in batches:
                    await write(prompt, batch)
        result = None if evaluator is None else evaluator.result()
        encode_closing = partial(self.serializer.encode_closing, total_usage(streams, self.tokens), result)
        return await self.context.run_in_thread(encode_closing) if in_thread else encode_closing()

    def _observe_latency(self, prompt: int, batch: list[Delta]) -> None:
        """Record the time to the first token, or since the prompt's previous tokens."""
        for delta in batch:  # faster than `any` with a generator, at each token of most streams
            if delta.token_ids:
                break
        else:
            return
        now, before = time.monotonic(), self.latest.get(prompt)
        if before is not None:
            self.context.metrics.inter_token.observe(now - before)
        elif not self.latest:
            self.context.metrics.began(now - self.request[COUNTS].started)
        self.latest[prompt] = now

    def _encode(self, prompt: int, batch: Sequence[Delta]) -> bytes:
        """Encode the events of a batch. Raise EngineDead if a sample was aborted."""
        gained = 0
        for delta in batch:
            if delta.finish_reason == "abort" and not _shows_aborts(self.request, self.context):
                raise _aborted()
            gained += len(delta.token_ids)
        self.tokens += gained
        return b"".join([self.serializer.encode_delta(prompt, delta) for delta in batch])

    def _fail(self, error: Exception) -> bytes:
        """Abort the engine requests, log and count the error, and return the events that report it."""
        counts = self.request[COUNTS]
        failure = (
            self.job.field_error(error, 0) if isinstance(error, InvalidField) else from_exception(error, counts.id)
        )
        counts.failed = failure.status
        self.context.metrics.refuse(failure.limit)
        if failure.status >= 500:
            trace = error if failure.status == 500 else None
            log.error("%s: failed while streaming: %s", counts.id, error, exc_info=trace)
        for stream in self.streams:
            stream.abort()
        return self.serializer.encode_failure(failure)
