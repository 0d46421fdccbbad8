"""vLLM's endpoints for generation from token ids: `/inference/v1/generate` and `/abort_requests`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from aiohttp import web

from tok_client.types import (
    UNSET,
    AbortRequests,
    Maybe,
    StopWhenResult,
    TokenChoice,
    TokenGeneration,
    TokenGenerationRequest,
    Usage,
)
from tok_core import Completion, Delta, RequestOutput, RequestStream
from tok_server.http import Context
from tok_server.openai import (
    DONE,
    GenerationJob,
    TokenTexts,
    UnsupportedFields,
    chat_logprobs,
    check_model,
    event,
    prompt_logprobs,
    running_usage,
    total_usage,
    value_or_none,
)
from tok_server.rl.token_jobs import answer, make_job, run_jobs, stream_jobs, weight_fields
from tok_server.rl.trainer_context import read_fields, trainer_context
from tok_server.wire import ApiError, encode, invalid, json_post, new_id

ID_PREFIX = "generate-tokens-"  # of request ids in answers, as in vLLM
NON_SAMPLING_FIELDS = frozenset(
    {"prompt", "prompts", "model", "stream", "stream_options", "echo", "best_of", "stop_when", "cache_salt", "priority"}
)
"""Fields of /v1/completions that are not sampling parameters."""
UNSUPPORTED = (
    UnsupportedFields({"features": (None,)}, "is not supported: the server takes text only"),
    UnsupportedFields({"kv_transfer_params": (None,)}, "is not supported: one engine prefills and decodes"),
)


async def generate(request: web.Request) -> web.StreamResponse:
    """Return samples of a prompt of token ids, as token ids, as a whole or streamed."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, TokenGenerationRequest, UNSUPPORTED)
    job = await context.run_in_thread(partial(_job, fields, context))
    if job.stream:
        return await stream_jobs(request, context, [job], partial(_Chunks, job, context), headers)
    (output,) = await run_jobs(request, context, [job])
    body = await context.run_in_thread(partial(_encode, job, output, context))
    return answer(context, body, [job], headers)


def _job(fields: TokenGenerationRequest, context: Context) -> GenerationJob:
    check_model(value_or_none(fields.model), context.settings.model_names)
    for name in NON_SAMPLING_FIELDS & fields.sampling_params.keys():
        raise invalid(f"sampling_params.{name}", f"sampling_params.{name} is no sampling parameter", "unknown_field")
    top_level = ("cache_salt", "priority", "stream", "stream_options")
    all_fields = {**fields.sampling_params, **{name: value_or_none(getattr(fields, name)) for name in top_level}}
    given = {name: value for name, value in all_fields.items() if value is not None}
    max_tokens = {"max_tokens": context.engine.info.max_model_len}
    job = make_job(max_tokens | given, fields.token_ids, "token_ids", context.engine, {})
    id = value_or_none(fields.request_id) or new_id("gen")
    return msgspec.structs.replace(job, id=id, default_max_tokens="max_tokens" not in given)


def _encode(job: GenerationJob, output: RequestOutput, context: Context) -> bytes:
    texts, top = TokenTexts.of(context.engine.tokenizer, job), job.prompt_logprobs
    of_prompt = output.prompt_logprobs
    tokens = sum(len(sample.token_ids) for sample in output.outputs)
    generation = TokenGeneration(
        request_id=ID_PREFIX + job.id,
        choices=[_choice(sample, texts) for sample in output.outputs],
        prompt_logprobs=None if top is None or of_prompt is None else prompt_logprobs(of_prompt, texts, top),
        usage=total_usage([output], tokens),
    )
    return msgspec.json.encode(generation)


def _choice(sample: Completion, texts: TokenTexts) -> TokenChoice:
    return TokenChoice(
        index=sample.index,
        logprobs=None if sample.logprobs is None else chat_logprobs(sample.logprobs, texts),
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        token_ids=sample.token_ids,
        **weight_fields((sample.weight_version, sample.weight_spans), len(sample.token_ids)),
    )


class _Chunks:
    """Serializer of a stream's events; an event holds new tokens of one sample."""

    max_logprobs: int | None = None

    def __init__(self, job: GenerationJob, context: Context, streams: Sequence[RequestStream]) -> None:
        self._job = job
        self._texts = TokenTexts.of(context.engine.tokenizer, job)
        self._stream = streams[0]
        self._tokens = [0] * job.params.n

    def encode_opening(self) -> bytes:
        """Return no events: samples begin with their first token."""
        return b""

    def encode_delta(self, prompt: int, delta: Delta) -> bytes:
        """Encode a chunk with new tokens of a sample, or its end."""
        if not delta.token_ids and delta.finish_reason is None:
            return b""
        self._tokens[delta.index] += len(delta.token_ids)
        choice = TokenChoice(
            index=delta.index,
            logprobs=None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._texts),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids,
        )
        if delta.finish_reason is not None:
            tokens = self._tokens[delta.index]
            weights = weight_fields(self._stream.weights_of(delta.index, tokens), tokens)
            choice = msgspec.structs.replace(choice, **weights)
        usage = running_usage(self._job.prompts, sum(self._tokens)) if self._job.continuous_usage else UNSET
        return event(self._chunk([choice], usage))

    def encode_closing(self, token_usage: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the usage, if requested, and the end mark."""
        return (event(self._chunk([], token_usage)) if self._job.include_usage else b"") + DONE

    def encode_failure(self, failure: ApiError) -> bytes:
        """Encode the error in place of a chunk, and the end mark."""
        return event(failure.body()) + DONE

    def _chunk(self, choices: list[TokenChoice], usage: Maybe[Usage]) -> bytes:
        return encode(TokenGeneration(request_id=ID_PREFIX + self._job.id, choices=choices, usage=usage))


async def abort_requests(request: web.Request) -> web.Response:
    """Abort requests to /inference/v1/generate by their ids; their answers have the tokens so far."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, AbortRequests)
    for name in fields.request_ids:
        await context.engine.abort(f"{name.removeprefix(ID_PREFIX)}-0")
    return web.json_response({}, headers=headers)


VLLM_GENERATION = (
    json_post(
        "/inference/v1/generate", generate, TokenGenerationRequest, TokenGeneration, streamed=True, errors=(404,)
    ),
    json_post("/abort_requests", abort_requests, AbortRequests, dict[str, str]),
)
