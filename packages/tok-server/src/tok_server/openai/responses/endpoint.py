"""Serve /v1/responses: the model's answer to a conversation in items. Responses are not stored."""

from __future__ import annotations

import msgspec
from aiohttp import web

from tok_client.types import (
    UNSET,
    Maybe,
    ReasoningEcho,
    Response,
    ResponseFormatConfig,
    ResponseRequest,
    ResponseText,
)
from tok_core import AsyncEngine
from tok_server.http import CONTEXT, read_body
from tok_server.observability import COUNTS
from tok_server.openai.chat import endpoint as chat
from tok_server.openai.generation import RESPONSE, Job, TokenTexts, answer, given, read
from tok_server.openai.responses.as_chat import as_chat, renamed, with_response_field_names
from tok_server.openai.responses.form import ResponseForm
from tok_server.settings import Formats
from tok_server.wire import ApiError, Operation, json_of, json_or_events, new_id


async def create(request: web.Request) -> web.StreamResponse:
    """The model's answer to a conversation in items."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    settings = context.settings
    job, begun = await context.work(lambda: parse(body, context.engine, settings.model_name, settings.formats))
    return await answer(request, context, job, ResponseForm(job, begun, TokenTexts(context.engine.tokenizer)))


def parse(body: bytes, engine: AsyncEngine, model: str, formats: Formats) -> tuple[Job, Response]:
    """Parse the body into a Job and the response before any output. Slow for long inputs. Errors: ApiError."""
    request, ignored = read(body, ResponseRequest, RESPONSE)
    try:
        job = chat.job_of(as_chat(request), engine, model, formats, ignored)
    except ApiError as error:
        raise with_response_field_names(error) from error.__cause__
    names = {name: renamed(told) for name, told in job.names.items()}
    job = msgspec.structs.replace(job, id=new_id("resp").replace("-", "_"), names=names)
    return job, _begun(request, job)


def _begun(request: ResponseRequest, job: Job) -> Response:
    """Return the response before any output, with the request's settings."""
    reasoning = given(request.reasoning)
    return Response(
        id=job.id,
        created_at=job.created,
        status="in_progress",
        instructions=given(request.instructions),
        max_output_tokens=given(request.max_output_tokens),
        model=job.model,
        parallel_tool_calls=given(request.parallel_tool_calls) is not False,
        reasoning=ReasoningEcho(effort=None if reasoning is None else given(reasoning.effort)),
        temperature=job.params.temperature,
        text=_text(given(request.text)),
        tool_choice=given(request.tool_choice) or "auto",
        tools=given(request.tools) or [],
        top_logprobs=given(request.top_logprobs) or 0,
        top_p=job.params.top_p,
        user=_echo(request.user),
        safety_identifier=_echo(request.safety_identifier),
        prompt_cache_key=_echo(request.prompt_cache_key),
        metadata=given(request.metadata) or {},
    )


def _text(asked: ResponseText | None) -> ResponseText:
    any_text = ResponseFormatConfig(type="text")
    return ResponseText(format=any_text if asked is None else given(asked.format) or any_text)


def _echo(value: Maybe[str]) -> Maybe[str]:
    return UNSET if value is None else value


OPERATIONS = (
    Operation(
        "POST",
        "/v1/responses",
        create,
        request=json_of(ResponseRequest),
        answers={200: json_or_events(Response)},
        errors=(404,),
    ),
)
