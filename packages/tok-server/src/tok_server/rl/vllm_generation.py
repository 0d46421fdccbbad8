"""Endpoints of vLLM that take and return token ids: `/inference/v1/generate` and `/abort_requests`."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from tok_client.types import AbortRequests, TokenChoice, TokenGeneration, TokenGenerationRequest
from tok_core import Completion, RequestOutput
from tok_server.http import Context
from tok_server.openai import (
    GenerationJob,
    TokenTexts,
    UnsupportedFields,
    chat_logprobs,
    check_model,
    prompt_logprobs,
    total_usage,
    value_or_none,
)
from tok_server.rl.token_jobs import answer, job_of, run_jobs, spans_of
from tok_server.rl.trainer_context import read_fields, trainer_context
from tok_server.wire import Operation, invalid, json_of, new_id

ID_PREFIX = "generate-tokens-"  # of request ids in answers, as in vLLM
FIELDS = frozenset({"prompt", "prompts", "model", "stream", "echo", "best_of", "stop_when", "cache_salt", "priority"})
"""Fields of /v1/completions that are not sampling parameters."""
UNSUPPORTED = (
    UnsupportedFields({"stream": (None, False)}, "is not supported: answers are whole"),
    UnsupportedFields({"features": (None,)}, "is not supported: the server takes text only"),
    UnsupportedFields({"kv_transfer_params": (None,)}, "is not supported: one engine prefills and decodes"),
)


async def generate(request: web.Request) -> web.Response:
    """Return samples of a prompt of token ids, as token ids."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, TokenGenerationRequest, UNSUPPORTED)
    job = await context.run_in_thread(partial(_job, fields, context))
    (output,) = await run_jobs(request, context, [job])
    body = await context.run_in_thread(partial(_encode, job, output, context))
    return answer(context, body, [job], headers)


def _job(fields: TokenGenerationRequest, context: Context) -> GenerationJob:
    check_model(value_or_none(fields.model), context.settings.model_names)
    for name in FIELDS & fields.sampling_params.keys():
        raise invalid(f"sampling_params.{name}", f"sampling_params.{name} is no sampling parameter", "unknown_field")
    own = {"cache_salt": value_or_none(fields.cache_salt), "priority": value_or_none(fields.priority)}
    given = {name: value for name, value in {**fields.sampling_params, **own}.items() if value is not None}
    job = job_of(given, fields.token_ids, "token_ids", context.engine, {})
    return msgspec.structs.replace(job, id=value_or_none(fields.request_id) or new_id("gen"))


def _encode(job: GenerationJob, output: RequestOutput, context: Context) -> bytes:
    texts, top = TokenTexts.of(context.engine.tokenizer, job), job.prompt_logprobs
    of_prompt = output.prompt_logprobs
    tokens = sum(len(one.token_ids) for one in output.outputs)
    generation = TokenGeneration(
        request_id=ID_PREFIX + job.id,
        choices=[_choice(one, texts) for one in output.outputs],
        prompt_logprobs=None if top is None or of_prompt is None else prompt_logprobs(of_prompt, texts, top),
        usage=total_usage([output], tokens),
    )
    return msgspec.json.encode(generation)


def _choice(sample: Completion, texts: TokenTexts) -> TokenChoice:
    return TokenChoice(
        index=sample.index,
        logprobs=None if sample.logprobs is None else chat_logprobs(sample.logprobs, texts),
        finish_reason=sample.finish_reason,
        token_ids=sample.token_ids,
        weight_version=sample.weight_version,
        weight_spans=spans_of(sample),
    )


async def abort_requests(request: web.Request) -> web.Response:
    """Abort requests to /inference/v1/generate by their ids; they are answered with the tokens so far."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, AbortRequests)
    for name in fields.request_ids:
        await context.engine.abort(f"{name.removeprefix(ID_PREFIX)}-0")
    return web.json_response({}, headers=headers)


VLLM_GENERATION = (
    Operation(
        "POST",
        "/inference/v1/generate",
        generate,
        request=json_of(TokenGenerationRequest),
        answers={200: json_of(TokenGeneration)},
        errors=(404,),
    ),
    Operation(
        "POST",
        "/abort_requests",
        abort_requests,
        request=json_of(AbortRequests),
        answers={200: json_of(dict[str, str])},
    ),
)
