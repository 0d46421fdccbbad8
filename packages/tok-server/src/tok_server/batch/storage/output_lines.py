"""Encode answers as lines of the output file, in OpenAI's format."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from tok_client.decoders import decoder
from tok_client.types import BatchLineError
from tok_server.batch.storage.answers import LineAnswer
from tok_server.wire import ApiError, encode, internal, new_id

MIN_TAIL_DECODED_BYTES = 1 << 20  # bytes of a body beyond which only its end is decoded for the usage

log = logging.getLogger("tok.server")

UnansweredReason = Literal["batch_expired", "batch_cancelled"]
UNANSWERED_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "The batch was cancelled before this request was executed.",
}


class FinishedLine(NamedTuple):
    """A line that has been computed: the function that encodes its answer, or the error instead."""

    line: int
    custom_id: str
    result: Callable[[], bytes] | ApiError


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Line(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: BatchLineError | None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = 0


class _Reasoning(msgspec.Struct):
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct):
    """Usage of a completion or a response, which name the same counts differently."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoning | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Cached | None = None
    output_tokens_details: _Reasoning | None = None


class _Used(msgspec.Struct):
    usage: _Usage | None = None


def encode_line_answer(finished: FinishedLine) -> LineAnswer:
    """Return the encoded answer. Takes long for many choices."""
    body, status = _body(finished)
    response = _Response(status, new_id("req"), msgspec.Raw(body))
    text = encode(_Line(new_id("batch_req", "_"), finished.custom_id, response, None))
    return line_answer(finished.line, status, body, text)


def line_answer(line: int, status: int, body: bytes, text: bytes) -> LineAnswer:
    """Return the answer whose line of the output is `text`, which contains `body`."""
    token_usage = _usage_of(body)
    cached = token_usage.prompt_tokens_details or token_usage.input_tokens_details or _Cached()
    reasoning = token_usage.completion_tokens_details or token_usage.output_tokens_details or _Reasoning()
    return LineAnswer(
        line,
        status != 200,
        token_usage.prompt_tokens or token_usage.input_tokens,
        cached.cached_tokens or 0,
        token_usage.completion_tokens or token_usage.output_tokens,
        reasoning.reasoning_tokens or 0,
        text,
    )


def _usage_of(body: bytes) -> _Usage:
    """Return the usage. A long body is decoded from its usage on: decoding all of it holds the GIL."""
    at = body.rfind(b'"usage":{') if len(body) > MIN_TAIL_DECODED_BYTES else -1
    if at >= 0:
        with suppress(msgspec.DecodeError):  # else the match lies within another member
            return decoder(_Used).decode(b"{" + body[at:]).usage or _Usage()
    return decoder(_Used).decode(body).usage or _Usage()


def _body(finished: FinishedLine) -> tuple[bytes, int]:
    if isinstance(finished.result, ApiError):
        return finished.result.body(), finished.result.status
    try:
        return finished.result(), 200
    except Exception as error:
        failure = internal(new_id("req"))
        log.error("batch line %r: %s", finished.custom_id, failure.message, exc_info=error)
        return failure.body(), failure.status


def unanswered_line(custom_id: str, reason: UnansweredReason) -> bytes:
    """Return the error file's line for an input line that was never answered."""
    return encode(
        _Line(
            new_id("batch_req", "_"), custom_id, None, BatchLineError(code=reason, message=UNANSWERED_MESSAGES[reason])
        )
    )
