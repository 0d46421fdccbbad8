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
from tok_server.openai.completions.best_of import drawn
from tok_server.openai.completions.echo import check_repeated
from tok_server.openai.completions.form import CompletionForm
from tok_server.openai.completions.prompts import tokenised
from tok_server.openai.generation import (
    COMPLETION,
    Job,
    TokenTexts,
    answer,
    cache_salt_of,
    check_model,
    check_prompt_logprobs,
    given,
    read,
    rule_of,
    sampling_params,
    structure_of,
    wants_continuous_usage,
    wants_usage,
)
from tok_server.wire import Operation, invalid, json_of, json_or_events, new_id

MAX_TOKENS = 16  # OpenAI's default; lowered where the model's length leaves fewer tokens
MAX_CHOICES = 65_536  # prompts × samples of a request
MAX_LOOP_PROMPT_BYTES = 8192  # bytes of a body that the event loop parses itself: some thousand token ids
TOKEN_IDS = re.compile(rb'"prompt"\s*:\s*\[[\s\[]*\d')


async def create(request: web.Request) -> web.StreamResponse:
    """Text that continues a prompt."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    # Text is parsed in a thread: the tokenizer is slow, and releases the interpreter lock.
    short = len(body) <= MAX_LOOP_PROMPT_BYTES and TOKEN_IDS.search(body) is not None
    engine, model = context.engine, context.settings.model_name
    job = parse(body, engine, model) if short else await context.work(lambda: parse(body, engine, model))
    return await answer(request, context, job, CompletionForm(job, TokenTexts(engine.tokenizer)))


def parse(body: bytes, engine: AsyncEngine, model: str) -> Job:
    """Parse the body into a Job with prompts as token ids. Slow for long prompts. Errors: ApiError."""
    request, ignored = read(body, CompletionRequest, COMPLETION)
    check_model(given(request.model), model)
    max_tokens = given(request.max_tokens)
    structure = structure_of(request)
    names = {} if structure is None else {"grammar": structure.field}
    params = sampling_params(
        request,
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=given(request.logprobs),
        info=engine.info,
        names=names,
        prompt_logprobs=_prompt_logprobs(request),
        grammar=None if structure is None else structure.grammar,
    )
    best_of = drawn(request, params)
    prompts = _prompts(request, best_of or params.n, engine)
    job = Job(
        id=new_id("cmpl"),
        created=int(time.time()),
        model=model,
        prompts=prompts,
        params=params,
        best_of=best_of,
        stream=bool(given(request.stream)),
        include_usage=wants_usage(request),
        continuous_usage=wants_continuous_usage(request),
        return_token_ids=bool(given(request.return_token_ids)),
        echo=bool(given(request.echo)),
        prompt_logprobs=check_prompt_logprobs(request),
        ignored=ignored,
        default_length=max_tokens is None,
        stop_when=rule_of(request, n=params.n, prompts=len(prompts), tokenizer=engine.tokenizer),
        cache_salt=cache_salt_of(request),
        names=names,
    )
    check_repeated(job)
    return job


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return the number of top tokens per prompt position that `echo` and `prompt_logprobs` need together."""
    asked = [check_prompt_logprobs(request), given(request.logprobs) if given(request.echo) else None]
    return max((one for one in asked if one is not None), default=None)


def _prompts(request: CompletionRequest, n: int, engine: AsyncEngine) -> list[list[int]]:
    prompts = request.prompts()
    if len(prompts) * n > MAX_CHOICES:
        allowed = f"at most {MAX_CHOICES} choices (prompts × n)"
        raise invalid("prompt", f"prompt holds {len(prompts)} prompts, n is {n}; allowed: {allowed}")
    return tokenised(prompts, engine, "prompt")


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
