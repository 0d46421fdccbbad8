"""Serve /v1/completions: text that continues a prompt."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from tok_client.types import Completion, CompletionRequest
from tok_core import AsyncEngine, InvalidField, SamplingParams
from tok_server.openai.completions.serializer import CompletionSerializer
from tok_server.openai.generation import (
    COMPLETION,
    GenerationJob,
    TokenTexts,
    answer_request,
    best_of_params,
    check_model,
    check_prompt_logprobs,
    common_fields,
    has_few_token_ids,
    parse_request,
    parse_stop_when,
    requested_format,
    sampling_params,
    tokenise_prompts,
    value_or_none,
)
from tok_server.settings import AUTO, Formats
from tok_server.wire import invalid, invalid_field, json_post, new_id

DEFAULT_MAX_TOKENS = 16  # OpenAI's default; lowered where the model's length leaves fewer tokens
MAX_CHOICES = 65_536  # prompts × samples of a request
MAX_ECHO_TOKENS = 1 << 24  # prompt tokens, and top tokens reported beside them, repeated in all choices together


async def create(request: web.Request) -> web.StreamResponse:
    """Return text that continues a prompt."""
    return await answer_request(request, parse, partial(has_few_token_ids, "prompt"))


def parse(
    body: bytes, engine: AsyncEngine, names: tuple[str, ...], _: Formats = AUTO
) -> tuple[GenerationJob, CompletionSerializer]:
    """Parse the body into a job with prompts as token ids, and its serializer. Slow for text. Errors: ApiError."""
    request, ignored = parse_request(body, CompletionRequest, COMPLETION)
    model = check_model(value_or_none(request.model), names)
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
    prompts = _prompts(request, best_of or params.n, params, engine)
    job = GenerationJob(
        id=new_id("cmpl"),
        model=model,
        prompts=prompts,
        params=params,
        best_of=best_of,
        echo=bool(value_or_none(request.echo)),
        ignored=ignored,
        default_max_tokens=max_tokens is None,
        stop_when=parse_stop_when(request, n=params.n, prompts=len(prompts), tokenizer=engine.tokenizer),
        field_names=field_names,
        **common_fields(request),
    )
    check_echo_size(job)
    return job, CompletionSerializer(job, TokenTexts.of(engine.tokenizer, job))


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return the number of top tokens per prompt position that `echo` and `prompt_logprobs` need together."""
    requested = [
        check_prompt_logprobs(request),
        value_or_none(request.logprobs) if value_or_none(request.echo) else None,
    ]
    return max((one for one in requested if one is not None), default=None)


def _prompts(request: CompletionRequest, n: int, params: SamplingParams, engine: AsyncEngine) -> list[list[int]]:
    prompts = request.prompts()
    if len(prompts) * n > MAX_CHOICES:
        allowed = f"at most {MAX_CHOICES} choices (prompts × n)"
        raise invalid("prompt", f"prompt holds {len(prompts)} prompts, n is {n}; allowed: {allowed}")
    special = value_or_none(request.add_special_tokens) is not False
    truncates = params.truncate_prompt_tokens is not None
    ids = tokenise_prompts(prompts, engine, "prompt", add_special_tokens=special, truncates=truncates)
    if not truncates:
        return ids
    tokenizer = engine.tokenizer if special and isinstance(prompts[0], str) else None
    begin = 0 if tokenizer is None else tokenizer.begin_count
    return [params.truncate(one, engine.info.max_model_len, begin) for one in ids]


def best_of_count(request: CompletionRequest, params: SamplingParams) -> int | None:
    """Return how many samples per prompt are generated if these are more than n, else None. Errors: ApiError 400."""
    best_of, n = value_or_none(request.best_of), params.n
    if best_of is None or best_of == n:
        return None
    if best_of < n:
        raise invalid("best_of", f"best_of is {best_of}; allowed: at least n ({n})")
    if value_or_none(request.stream):
        raise invalid("best_of", f"best_of is {best_of}; allowed with stream=true: n ({n})")
    try:
        best_of_params(params, best_of)
    except InvalidField as error:
        raise invalid_field(error, "best_of") from error
    return best_of


def check_echo_size(job: GenerationJob) -> None:
    """Raise ApiError (400) if the choices would repeat more of their prompts than fits into memory."""
    entries_per_token = (1 + (0 if job.params.logprobs is None else 1 + job.params.logprobs)) if job.echo else 0
    entries_per_token += 0 if job.prompt_logprobs is None else 1 + job.prompt_logprobs
    tokens, n = sum(map(len, job.prompts)), job.params.n
    if n * tokens * entries_per_token > MAX_ECHO_TOKENS:
        name = "n" if n > 1 else "echo" if job.echo else "prompt_logprobs"
        what = "n × prompt tokens × values that echo and prompt_logprobs report per token"
        message = f"{name}: {what} is {n} × {tokens} × {entries_per_token}; allowed: at most {MAX_ECHO_TOKENS} in all"
        raise invalid(name, message)


OPERATIONS = (json_post("/v1/completions", create, CompletionRequest, Completion, streamed=True, errors=(404,)),)
