"""Serve /v1/messages, and the number of tokens of its prompts at /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from tok_client.types import ChatCompletionRequest, known_fields
from tok_core import AsyncEngine
from tok_server.anthropic.answer_types import MessageAnswer, TokenCount
from tok_server.anthropic.as_chat import (
    as_chat,
    messages_field_name,
    settings_without_effect,
    with_messages_field_names,
)
from tok_server.anthropic.errors import MESSAGES_ERRORS
from tok_server.anthropic.request_types import CountTokensRequest, MessagesRequest
from tok_server.anthropic.serializer import MessagesSerializer
from tok_server.http import CONTEXT, read_body
from tok_server.observability import COUNTS
from tok_server.openai import (
    OTHER_SERVERS,
    GenerationJob,
    NeutralValues,
    UnsupportedFields,
    answer_request,
    ignored_header,
    make_chat_job,
    parse_request,
    value_or_none,
)
from tok_server.settings import AUTO, Formats
from tok_server.wire import (
    OVERLOADED,
    ApiError,
    invalid,
    json_post,
    json_response,
    new_id,
)

_HOSTED: Mapping[str, NeutralValues] = {
    "container": (None,),
    "mcp_servers": (None, []),
    "inference_geo": (None,),
    "service_tier": (None, "auto", "standard_only"),
}
_NEUTRAL: Mapping[str, NeutralValues] = {"n": (None, 1), "logprobs": (None, False)}
# Some clients send these to every API; they change no result.
_IDENTIFIERS = {"user", "safety_identifier", "prompt_cache_key"}
_OTHER_ENDPOINTS = known_fields(ChatCompletionRequest) - known_fields(MessagesRequest) - _HOSTED.keys() - _IDENTIFIERS

MESSAGES = (
    *OTHER_SERVERS,
    UnsupportedFields(_HOSTED, "is not supported yet"),
    UnsupportedFields(
        {name: _NEUTRAL.get(name, (None,)) for name in sorted(_OTHER_ENDPOINTS)},
        "is a field of other endpoints, not of /v1/messages",
    ),
)
THREAD_UNSUPPORTED = "thread_unsupported_request"  # the code on which clients send all messages instead


async def create(request: web.Request) -> web.StreamResponse:
    """Return the model's answer to a conversation, in the shape of Anthropic's API."""
    return await answer_request(request, parse)


async def count_tokens(request: web.Request) -> web.Response:
    """Return the number of tokens of the prompt that /v1/messages makes of a conversation."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    settings = context.settings
    job = await context.run_in_thread(
        lambda: _make_job(body, CountTokensRequest, context.engine, settings.model_names, settings.formats)
    )
    (prompt,) = job.prompts
    request[COUNTS].prompt_tokens += len(prompt)
    return json_response(TokenCount(input_tokens=len(prompt)), headers=ignored_header(context, job.ignored))


def parse(
    body: bytes, engine: AsyncEngine, names: tuple[str, ...], formats: Formats = AUTO
) -> tuple[GenerationJob, MessagesSerializer]:
    """Parse the body into a job and its serializer. Slow for long inputs. Errors: ApiError."""
    job = _make_job(body, MessagesRequest, engine, names, formats)
    # As with Anthropic's current models, `max_tokens` may exceed what the model's length leaves after the prompt.
    job = msgspec.structs.replace(job, id=new_id("msg", "_"), default_max_tokens=True)
    return job, MessagesSerializer(job, engine.tokenizer)


def _make_job(
    body: bytes, kind: type[CountTokensRequest], engine: AsyncEngine, names: tuple[str, ...], formats: Formats
) -> GenerationJob:
    request, ignored = parse_request(body, kind, MESSAGES)
    if value_or_none(request.thread) is not None:
        message = "thread is set, but the server stores no conversations; allowed: null, with all messages"
        raise invalid("thread", message, THREAD_UNSUPPORTED)
    template = engine.chat_template
    variables = frozenset() if template is None else template.variables
    try:
        job = make_chat_job(as_chat(request, variables), engine, names, formats)
    except ApiError as error:
        raise with_messages_field_names(error) from error.__cause__
    without_effect = settings_without_effect(request, variables, reasons=job.markup.reasoning)
    field_names = {name: messages_field_name(field) for name, field in job.field_names.items()}
    return msgspec.structs.replace(
        job, ignored=(*ignored, *without_effect), field_names={"stop": "stop_sequences", **field_names}
    )


OPERATIONS = (
    json_post(
        "/v1/messages",
        create,
        MessagesRequest,
        MessageAnswer,
        streamed=True,
        errors=(404, OVERLOADED),
        error_format=MESSAGES_ERRORS,
    ),
    json_post(
        "/v1/messages/count_tokens",
        count_tokens,
        CountTokensRequest,
        TokenCount,
        errors=(404, OVERLOADED),
        error_format=MESSAGES_ERRORS,
    ),
)
