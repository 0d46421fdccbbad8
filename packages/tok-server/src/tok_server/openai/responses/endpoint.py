"""Serve /v1/responses: the model's answer to a conversation in items. Responses are not stored."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from tok_client.types import (
    UNSET,
    ChatCompletionRequest,
    Maybe,
    ReasoningEcho,
    Response,
    ResponseFormatConfig,
    ResponseRequest,
    ResponseText,
)
from tok_core import AsyncEngine
from tok_server.openai.chat import chat_prompt
from tok_server.openai.chat import endpoint as chat
from tok_server.openai.generation import (
    RESPONSE,
    GenerationJob,
    TokenTexts,
    answer_request,
    parse_request,
    value_or_none,
)
from tok_server.openai.responses.as_chat import (
    as_chat,
    ignored_fields,
    response_field_name,
    with_response_field_names,
)
from tok_server.openai.responses.serializer import ResponseSerializer
from tok_server.openai.responses.truncation import truncated_job
from tok_server.settings import AUTO, Formats
from tok_server.wire import ApiError, json_post, new_id

T = TypeVar("T")


async def create(request: web.Request) -> web.StreamResponse:
    """Return the model's answer to a conversation in items."""
    return await answer_request(request, parse)


def parse(
    body: bytes, engine: AsyncEngine, names: tuple[str, ...], formats: Formats = AUTO
) -> tuple[GenerationJob, ResponseSerializer]:
    """Parse the body into a job and its serializer. Slow for long inputs. Errors: ApiError."""
    request, ignored = parse_request(body, ResponseRequest, RESPONSE)
    try:
        job = _make_job(request, engine, names, formats)
    except ApiError as error:
        raise with_response_field_names(error) from error.__cause__
    job = msgspec.structs.replace(
        job,
        id=new_id("resp", "_"),
        ignored=(*ignored, *ignored_fields(request), *map(response_field_name, job.ignored)),
        field_names={name: response_field_name(field) for name, field in job.field_names.items()},
    )
    return job, ResponseSerializer(job, _initial_response(request, job), TokenTexts(engine.tokenizer))


def _make_job(request: ResponseRequest, engine: AsyncEngine, names: tuple[str, ...], formats: Formats) -> GenerationJob:
    """Return the job of the request as a chat. Errors: ApiError with a chat's field names, or this request's."""
    make_job = partial(chat.make_chat_job, engine=engine, names=names, formats=formats)
    if value_or_none(request.truncation) != "auto":
        return make_job(as_chat(request))

    def count_tokens(shortened: ChatCompletionRequest) -> int:
        return len(chat_prompt(shortened, engine, formats).token_ids)

    return truncated_job(as_chat(request), make_job, count_tokens, engine.info.max_model_len)


def _initial_response(request: ResponseRequest, job: GenerationJob) -> Response:
    """Return the response before any output, with the request's settings."""
    reasoning = value_or_none(request.reasoning)
    return Response(
        id=job.id,
        created_at=job.created,
        status="in_progress",
        instructions=value_or_none(request.instructions),
        max_output_tokens=value_or_none(request.max_output_tokens),
        model=job.model,
        parallel_tool_calls=value_or_none(request.parallel_tool_calls) is not False,
        reasoning=ReasoningEcho()
        if reasoning is None
        else ReasoningEcho(effort=value_or_none(reasoning.effort), summary=value_or_none(reasoning.summary)),
        temperature=job.params.temperature,
        text=_text(value_or_none(request.text)),
        tool_choice=value_or_none(request.tool_choice) or "auto",
        tools=value_or_none(request.tools) or [],
        top_logprobs=value_or_none(request.top_logprobs) or 0,
        top_p=job.params.top_p,
        truncation=value_or_none(request.truncation) or "disabled",
        user=_echo(request.user),
        safety_identifier=_echo(request.safety_identifier),
        prompt_cache_key=_echo(request.prompt_cache_key),
        metadata=value_or_none(request.metadata) or {},
    )


def _text(requested: ResponseText | None) -> ResponseText:
    text_format = ResponseFormatConfig(type="text")
    if requested is None:
        return ResponseText(format=text_format)
    return ResponseText(format=value_or_none(requested.format) or text_format, verbosity=_echo(requested.verbosity))


def _echo(value: Maybe[T]) -> Maybe[T]:
    return UNSET if value is None else value


OPERATIONS = (json_post("/v1/responses", create, ResponseRequest, Response, streamed=True, errors=(404,)),)
