"""Serve /v1/chat/completions: the assistant's next message in a conversation."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from tok_client.types import ChatCompletion, ChatCompletionRequest
from tok_core import AsyncEngine, InvalidField, SamplingParams
from tok_core.sampling_params import Grammar
from tok_server.http import CONTEXT, read_body
from tok_server.observability import COUNTS
from tok_server.openai.chat.answer_grammar import answer_shape
from tok_server.openai.chat.form import ChatForm
from tok_server.openai.chat.prompt import chat_prompt
from tok_server.openai.generation import (
    CHAT,
    Job,
    TokenTexts,
    answer,
    cache_salt_of,
    check_model,
    check_prompt_logprobs,
    given,
    read,
    renamed,
    rule_of,
    sampling_params,
    structure_of,
    wants_continuous_usage,
    wants_usage,
)
from tok_server.settings import Formats
from tok_server.wire import Operation, invalid, json_of, json_or_events, new_id

AUTO = Formats()


async def create(request: web.Request) -> web.StreamResponse:
    """The assistant's next message in a conversation."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    settings = context.settings
    job = await context.work(lambda: parse(body, context.engine, settings.model_name, settings.formats))
    return await answer(request, context, job, ChatForm(job, TokenTexts(context.engine.tokenizer)))


def parse(body: bytes, engine: AsyncEngine, model: str, formats: Formats = AUTO) -> Job:
    """Parse the body into a Job with the messages as token ids. Slow for long prompts. Errors: ApiError.

    formats  how the model writes tool calls and reasoning
    """
    request, ignored = read(body, ChatCompletionRequest, CHAT)
    return job_of(request, engine, model, formats, ignored)


def job_of(
    request: ChatCompletionRequest, engine: AsyncEngine, model: str, formats: Formats, ignored: tuple[str, ...] = ()
) -> Job:
    """Turn the decoded request into a Job; otherwise as `parse`."""
    check_model(given(request.model), model)
    newer = given(request.max_completion_tokens) is not None
    names = {
        "prompt": "messages",
        "logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens" if newer else "max_tokens",
    }
    structure = structure_of(request)
    if structure is not None:
        names["grammar"] = structure.field
    params = sampling_params(
        request,
        max_tokens=_max_tokens(request),
        logprobs=_top_logprobs(request),
        info=engine.info,
        names=names,
        prompt_logprobs=check_prompt_logprobs(request),
        grammar=None if structure is None else structure.grammar,
    )
    prompt = chat_prompt(request, engine, formats)
    shape = answer_shape(prompt.offer, prompt.markup, params.grammar, names.get("grammar", "response_format"))
    if shape.grammar is not params.grammar:
        params = _constrained(params, shape.grammar)
        names.setdefault("grammar", "tools")
    return Job(
        id=new_id("chatcmpl"),
        created=int(time.time()),
        model=model,
        prompts=[prompt.token_ids],
        params=params,
        stream=bool(given(request.stream)),
        include_usage=wants_usage(request),
        continuous_usage=wants_continuous_usage(request),
        return_token_ids=bool(given(request.return_token_ids)),
        prompt_logprobs=params.prompt_logprobs,
        markup=shape.markup,
        stop_when=rule_of(request, n=params.n, prompts=1, tokenizer=engine.tokenizer, markup=shape.markup),
        cache_salt=cache_salt_of(request),
        ignored=ignored,
        names=names,
    )


def _constrained(params: SamplingParams, grammar: Grammar | None) -> SamplingParams:
    try:
        return msgspec.structs.replace(params, grammar=grammar)
    except InvalidField as error:
        raise renamed(error, error.field) from error


def _max_tokens(request: ChatCompletionRequest) -> int | None:
    """Return the largest number of generated tokens; None: up to the model's length."""
    older, newer = given(request.max_tokens), given(request.max_completion_tokens)
    if older is not None and newer is not None and older != newer:
        message = f"max_tokens is {older} and max_completion_tokens is {newer}; allowed: one of them"
        raise invalid("max_tokens", message)
    return older if newer is None else newer


def _top_logprobs(request: ChatCompletionRequest) -> int | None:
    top = given(request.top_logprobs)
    if given(request.logprobs):
        return top or 0
    if top is not None:
        raise invalid("top_logprobs", "top_logprobs is only allowed together with logprobs=true")
    return None


OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        create,
        request=json_of(ChatCompletionRequest),
        answers={200: json_or_events(ChatCompletion)},
        errors=(404,),
    ),
)
