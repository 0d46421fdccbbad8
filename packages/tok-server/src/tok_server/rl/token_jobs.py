"""Run the requests of the trainers' generation endpoints: one job for each prompt, answered as a whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from tok_client.types import UNSET, WeightVersionSpan
from tok_core import AsyncEngine, RequestOutput, RequestStream
from tok_server.http import Context
from tok_server.observability import COUNTS
from tok_server.openai import (
    MAX_GRAMMAR_CHECKS,
    MAX_LOGPROBS,
    EventSerializer,
    GenerationJob,
    SubmittedStreams,
    check_echo_size,
    check_grammar,
    check_limits,
    ignored_header,
    parse_completion,
    request_deadline,
    send_events,
)
from tok_server.wire import ApiError

MAX_LISTED_FIELDS = 64  # ignored sampling parameters that a header names


def make_job(
    fields: Mapping[str, object], prompt: list[int], name: str, engine: AsyncEngine, names: Mapping[str, str]
) -> GenerationJob:
    """Return the job of one prompt with `fields` of /v1/completions. Errors: ApiError.

    name   the endpoint's field with the prompt
    names  field of /v1/completions -> the endpoint's field, for errors
    """
    body = msgspec.json.encode({**fields, "prompt": [0], "return_tokens_as_token_ids": True})
    try:
        job, _ = parse_completion(body, engine, ("",))
    except ApiError as error:
        field = names.get(error.param or "", error.param)
        if field is None or field == error.param:
            raise
        message = error.message.replace(str(error.param), field, 1)
        raise ApiError(error.status, message, param=field, code=error.code) from error
    prompt = job.params.truncate(prompt, engine.info.max_model_len)
    own_names = {field: names.get(path, path) for field, path in job.field_names.items()}
    return msgspec.structs.replace(job, prompts=[prompt], field_names={**names, **own_names, "prompt": name})


async def run_jobs(request: web.Request, context: Context, jobs: Sequence[GenerationJob]) -> list[RequestOutput]:
    """Run jobs of one prompt each, and return their outputs. Aborted samples have the tokens so far.

    Errors: ApiError, EngineError. An exception or a cancellation aborts all jobs.
    """
    async with _submitted(request, context, jobs, MAX_LOGPROBS) as streams, request_deadline(request, context):
        outputs = [await stream.output() for stream in streams]
    first_tokens = [output.timings.first_token for output in outputs]
    if times := [time for time in first_tokens if time is not None]:
        context.metrics.began(min(times) - request[COUNTS].started)
    return outputs


async def stream_jobs(
    request: web.Request,
    context: Context,
    jobs: Sequence[GenerationJob],
    serializer_of: Callable[[Sequence[RequestStream]], EventSerializer],
    headers: Mapping[str, str],
    max_logprobs: int | None = None,
) -> web.StreamResponse:
    """Run streaming jobs of one prompt each, and answer with events, which `serializer_of` their streams encodes.

    max_logprobs  largest number of log-probabilities of a job; None: any
    """
    async with _submitted(request, context, jobs, max_logprobs) as streams:
        first = next((job for job in jobs if job.params.logprobs is not None), jobs[0])
        all_headers = dict(headers) | _ignored(context, jobs, headers)
        return await send_events(request, context, first, serializer_of(streams), streams, all_headers)


@asynccontextmanager
async def _submitted(
    request: web.Request, context: Context, jobs: Sequence[GenerationJob], max_logprobs: int | None
) -> AsyncIterator[list[RequestStream]]:
    """Check and submit jobs, and yield their streams."""
    counts, settings, engine = request[COUNTS], context.settings, context.engine
    for job in jobs:
        check_limits(job, settings.max_n, settings.min_client_priority, engine.info.max_model_len, max_logprobs)
        check_echo_size(job)
    context.admit(counts.tenant)
    async with request_deadline(request, context):
        for job in jobs:
            await check_grammar(engine, job, MAX_GRAMMAR_CHECKS, counts.tenant)
    with context.track_prompts(counts.tenant, len(jobs)):
        async with AsyncExitStack() as stack:
            streams = []
            for job in jobs:
                submitted = SubmittedStreams(engine, job, counts, counts.tenant, share_prefixes=settings.share_prefixes)
                streams += await stack.enter_async_context(submitted)
            yield streams


def answer(context: Context, body: bytes, jobs: Sequence[GenerationJob], headers: Mapping[str, str]) -> web.Response:
    """Return the answer, with a header that names the jobs' ignored sampling parameters."""
    all_headers = dict(headers) | _ignored(context, jobs, headers)
    return web.Response(body=body, content_type="application/json", headers=all_headers)


def weight_fields(weights: tuple[str, list[tuple[str, int]] | None], tokens: int) -> dict[str, Any]:
    """Return an answer's fields about the weights that computed a sample of `tokens` tokens.

    weights  `weight_version` and `weight_spans` of the sample
    """
    version, spans = weights
    starts = spans or [(version, 0)]
    ends = [*(start for _, start in starts[1:]), tokens]
    versions = [
        WeightVersionSpan(version=name, start=start, end=end)
        for (name, start), end in zip(starts, ends, strict=True)
        if start < end or start == 0
    ]
    return {"weight_version": version, "weight_spans": UNSET if spans is None else spans, "weight_versions": versions}


def _ignored(context: Context, jobs: Sequence[GenerationJob], headers: Mapping[str, str]) -> dict[str, str]:
    """Return the header that names ignored fields: those in `headers`, and the jobs' ignored sampling parameters."""
    ignored = dict.fromkeys(f"sampling_params.{name}" for job in jobs for name in job.ignored)
    header = ignored_header(context, list(ignored)[:MAX_LISTED_FIELDS])
    return {name: ",".join((*filter(None, [headers.get(name)]), value)) for name, value in header.items()}
