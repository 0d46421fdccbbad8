"""Run the requests of trainers' generation endpoints: one job for each prompt, answered once all have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import msgspec
from aiohttp import web

from tok_core import AsyncEngine, Completion, RequestOutput
from tok_server.http import Context
from tok_server.observability import COUNTS
from tok_server.openai import (
    MAX_GRAMMAR_CHECKS,
    MAX_LOGPROBS,
    GenerationJob,
    SubmittedStreams,
    check_echo_size,
    check_grammar,
    check_limits,
    ignored_header,
    parse_completion,
    request_deadline,
)
from tok_server.wire import ApiError

MAX_LISTED_FIELDS = 64  # sampling parameters without effect that a header names


def job_of(
    fields: Mapping[str, object], prompt: list[int], name: str, engine: AsyncEngine, names: Mapping[str, str]
) -> GenerationJob:
    """Return the job of one prompt, as /v1/completions makes it of `fields`. Errors: ApiError.

    name   field of the endpoint that holds the prompt
    names  a field of /v1/completions -> the endpoint's name of it, for errors
    """
    body = msgspec.json.encode({**fields, "prompt": [0], "return_tokens_as_token_ids": True})
    try:
        job, _ = parse_completion(body, engine, ("",))
    except ApiError as error:
        known = names.get(error.param or "", error.param)
        if known is None or known == error.param:
            raise
        message = error.message.replace(str(error.param), known, 1)
        raise ApiError(error.status, message, param=known, code=error.code) from error
    prompt = job.params.truncate(prompt, engine.info.max_model_len)
    own_names = {field: names.get(path, path) for field, path in job.field_names.items()}
    return msgspec.structs.replace(job, prompts=[prompt], field_names={**names, **own_names, "prompt": name})


async def run_jobs(request: web.Request, context: Context, jobs: Sequence[GenerationJob]) -> list[RequestOutput]:
    """Run jobs of one prompt each, and return their outputs. Aborted samples have the tokens so far.

    Errors: ApiError, EngineError. An exception or a cancellation aborts all jobs.
    """
    counts, settings, engine = request[COUNTS], context.settings, context.engine
    for job in jobs:
        check_limits(job, settings.max_n, settings.min_client_priority, engine.info.max_model_len, MAX_LOGPROBS)
        check_echo_size(job)
    context.admit(counts.tenant)
    with request_deadline(request, context):
        for job in jobs:
            await check_grammar(engine, job, MAX_GRAMMAR_CHECKS, counts.tenant)
    with context.track_prompts(counts.tenant, len(jobs)):
        async with AsyncExitStack() as stack:
            streams = []
            for job in jobs:
                submitted = SubmittedStreams(engine, job, counts, counts.tenant, share_prefixes=settings.share_prefixes)
                streams += await stack.enter_async_context(submitted)
            with request_deadline(request, context):
                outputs = [await stream.output() for stream in streams]
    if first := [one.timings.first_token for one in outputs if one.timings.first_token is not None]:
        context.metrics.began(min(first) - counts.started)
    return outputs


def answer(context: Context, body: bytes, jobs: Sequence[GenerationJob], headers: Mapping[str, str]) -> web.Response:
    """Return the answer; a header also names the sampling parameters of the jobs that have no effect."""
    response = web.Response(body=body, content_type="application/json", headers=headers)
    ignored = dict.fromkeys(f"sampling_params.{name}" for job in jobs for name in job.ignored)
    for name, value in ignored_header(context, list(ignored)[:MAX_LISTED_FIELDS]).items():
        response.headers[name] = ",".join((*filter(None, [headers.get(name)]), value))
    return response


def spans_of(sample: Completion) -> list[tuple[str, int]] | msgspec.UnsetType:
    """Return the weight spans of a sample that more than one version computed."""
    return msgspec.UNSET if sample.weight_spans is None else sample.weight_spans
