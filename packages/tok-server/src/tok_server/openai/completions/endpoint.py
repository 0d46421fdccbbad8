"""Serve /v1/completions: text that continues a prompt."""

from __future__ import annotations

import re
import time

from aiohttp import web

from tok_client.types import (
    Completion,
    CompletionRequest,
)
from tok_core import AsyncEngine
from tok_server.http import CONTEXT, read_body
from tok_server.observability import COUNTS
from tok_server.openai.completions.best_of import best_of_count
from tok_server.openai.completions.echo import check_echo_size
from tok_server.openai.completions.prompts import tokenise_prompts
from tok_server.openai.completions.serializer import CompletionSerializer
from tok_server.openai.generation import (
    COMPLETION,
    GenerationJob,
    TokenTexts,
    answer,
    cache_salt_of,
    check_model,
    check_prompt_logprobs,
    parse_request,
    parse_stop_when,
    requested_format,
    sampling_params,
    value_or_none,
    wants_continuous_usage,
    wants_usage,
)
from tok_server.wire import Operation, invalid, json_of, json_or_events, new_id

DEFAULT_MAX_TOKENS = 16  # OpenAI's default; lowered where the model's length leaves fewer tokens
MAX_CHOICES = 65_536  # prompts × samples of a request
MAX_LOOP_PROMPT_BYTES = 8192  # bytes of a body that the event loop parses itself: some thousand token ids
TOKEN_ID_PROMPT = re.compile(rb'"prompt"\s*:\s*\[[\s\[]*\d')


async def create(request: web.Request) -> web.StreamResponse:
    """Text that continues a prompt."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    # Text is parsed in a thread: the tokenizer is slow, and releases the interpreter lock.
    on_loop = len(body) <= MAX_LOOP_PROMPT_BYTES and TOKEN_ID_PROMPT.search(body) is not None
    engine, model = context.engine, context.settings.model_name
    job = parse(body, engine, model) if on_loop else await context.run_in_thread(lambda: parse(body, engine, model))
    return await answer(request, context, job, CompletionSerializer(job, TokenTexts(engine.tokenizer)))


def parse(body: bytes, engine: AsyncEngine, model: str) -> GenerationJob:
    """Parse the body into a Job with prompts as token ids. Slow for long prompts. Errors: ApiError."""
    request, ignored = parse_request(body, CompletionRequest, COMPLETION)
    check_model(value_or_none(request.model), model)
    max_tokens = value_or_none(request.max_tokens)
    chosen_format = requested_format(request)
    field_names = {} if chosen_format is None else {"grammar": chosen_format.field}
    params = sampling_params(
        request,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=value_or_none(request.logprobs),
        info=engine.info,
        field_names=field_names,
        prompt_logprobs=_prompt_logprobs(request),
        grammar=None if chosen_format is None else chosen_format.grammar,
    )
    best_of = best_of_count(request, params)
    prompts = _prompts(request, best_of or params.n, engine)
    job = GenerationJob(
        id=new_id("cmpl"),
        created=int(time.time()),
        model=model,
        prompts=prompts,
        params=params,
        best_of=best_of,
        stream=bool(value_or_none(request.stream)),
        include_usage=wants_usage(request),
        continuous_usage=wants_continuous_usage(request),
        return_token_ids=bool(value_or_none(request.return_token_ids)),
        echo=bool(value_or_none(request.echo)),
        prompt_logprobs=check_prompt_logprobs(request),
        ignored=ignored,
        default_max_tokens=max_tokens is None,
        stop_when=parse_stop_when(request, n=params.n, prompts=len(prompts), tokenizer=engine.tokenizer),
        cache_salt=cache_salt_of(request),
        field_names=field_names,
    )
    check_echo_size(job)
    return job


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return the number of top tokens per prompt position that `echo` and `prompt_logprobs` need together."""
    requested = [
        check_prompt_logprobs(request),
        value_or_none(request.logprobs) if value_or_none(request.echo) else None,
    ]
    return max((one for one in requested if one is not None), default=None)


def _prompts(request: CompletionRequest, n: int, engine: AsyncEngine) -> list[list[int]]:
    prompts = request.prompts()
    if len(prompts) * n > MAX_CHOICES:
        allowed = f"at most {MAX_CHOICES} choices (prompts × n)"
        raise invalid("prompt", f"prompt holds {len(prompts)} prompts, n is {n}; allowed: {allowed}")
    return tokenise_prompts(prompts, engine, "prompt")


OPERATIONS = (
    Operation(
        "POST",
        "/v1/completions",
        create,
        request=json_of(CompletionRequest),
        answers={200: json_or_events(Completion)},
        errors=(404,),
    ),
)
