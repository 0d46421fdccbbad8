"""Serve /v1/chat/completions: the assistant's next message in a conversation."""

from __future__ import annotations

import msgspec
from aiohttp import web

from tok_client.types import ChatCompletion, ChatCompletionRequest
from tok_core import AsyncEngine, InvalidField, SamplingParams
from tok_core.sampling_params import Grammar
from tok_server.openai.chat.prompt import chat_prompt
from tok_server.openai.chat.serializer import ChatSerializer
from tok_server.openai.chat.tools import answer_format
from tok_server.openai.generation import (
    CHAT,
    GenerationJob,
    TokenTexts,
    answer_request,
    check_model,
    check_prompt_logprobs,
    common_fields,
    parse_request,
    parse_stop_when,
    requested_format,
    sampling_params,
    value_or_none,
)
from tok_server.settings import AUTO, Formats
from tok_server.wire import invalid, invalid_field, json_post, new_id


async def create(request: web.Request) -> web.StreamResponse:
    """Return the assistant's next message in a conversation."""
    return await answer_request(request, parse)


def parse(
    body: bytes, engine: AsyncEngine, names: tuple[str, ...], formats: Formats = AUTO
) -> tuple[GenerationJob, ChatSerializer]:
    """Parse the body into a job with the messages as token ids, and its serializer. Slow for long prompts.

    formats  how the model writes tool calls and reasoning

    Errors: ApiError.
    """
    request, ignored = parse_request(body, ChatCompletionRequest, CHAT)
    job = make_chat_job(request, engine, names, formats, ignored)
    return job, ChatSerializer(job, TokenTexts.of(engine.tokenizer, job))


def make_chat_job(
    request: ChatCompletionRequest,
    engine: AsyncEngine,
    names: tuple[str, ...],
    formats: Formats,
    ignored: tuple[str, ...] = (),
) -> GenerationJob:
    """Return the job of a decoded request. Errors: as `parse`."""
    model = check_model(value_or_none(request.model), names)
    has_max_completion_tokens = value_or_none(request.max_completion_tokens) is not None
    field_names = {
        "prompt": "messages",
        "logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens" if has_max_completion_tokens else "max_tokens",
    }
    requested = requested_format(request)
    if requested is not None:
        field_names["grammar"] = requested.field
    params = sampling_params(
        request,
        max_tokens=_max_tokens(request),
        logprobs=_top_logprobs(request),
        info=engine.info,
        field_names=field_names,
        prompt_logprobs=check_prompt_logprobs(request),
        grammar=None if requested is None else requested.grammar,
    )
    prompt = chat_prompt(request, engine, formats, truncates=params.truncate_prompt_tokens is not None)
    constrained = answer_format(
        prompt.allowed_calls, prompt.markup, params.grammar, field_names.get("grammar", "response_format")
    )
    if constrained.grammar is not params.grammar:
        params = _with_grammar(params, constrained.grammar)
        field_names.setdefault("grammar", "tools")
    return GenerationJob(
        id=new_id("chatcmpl"),
        model=model,
        prompts=[params.truncate(prompt.token_ids, engine.info.max_model_len, prompt.begin_count)],
        params=params,
        markup=constrained.markup,
        stop_when=parse_stop_when(
            request, n=params.n, prompts=1, tokenizer=engine.tokenizer, markup=constrained.markup
        ),
        ignored=(*ignored, *prompt.ignored),
        field_names=field_names,
        **common_fields(request),
    )


def _with_grammar(params: SamplingParams, grammar: Grammar | None) -> SamplingParams:
    try:
        return msgspec.structs.replace(params, grammar=grammar)
    except InvalidField as error:
        raise invalid_field(error, error.field) from error


def _max_tokens(request: ChatCompletionRequest) -> int | None:
    """Return the largest number of generated tokens; None: up to the model's length."""
    max_tokens, max_completion_tokens = value_or_none(request.max_tokens), value_or_none(request.max_completion_tokens)
    if max_tokens is not None and max_completion_tokens is not None and max_tokens != max_completion_tokens:
        message = (
            f"max_tokens is {max_tokens} and max_completion_tokens is {max_completion_tokens}; allowed: one of them"
        )
        raise invalid("max_tokens", message)
    return max_tokens if max_completion_tokens is None else max_completion_tokens


def _top_logprobs(request: ChatCompletionRequest) -> int | None:
    top = value_or_none(request.top_logprobs)
    if value_or_none(request.logprobs):
        return top or 0
    if top is not None:
        raise invalid("top_logprobs", "top_logprobs is only allowed together with logprobs=true")
    return None


OPERATIONS = (
    json_post("/v1/chat/completions", create, ChatCompletionRequest, ChatCompletion, streamed=True, errors=(404,)),
)
