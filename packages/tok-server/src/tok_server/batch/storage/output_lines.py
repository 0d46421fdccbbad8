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

Unanswered = Literal["batch_expired", "batch_cancelled"]
WHY = {
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


def write(done: FinishedLine) -> LineAnswer:
    """Return the encoded answer. Takes long for many choices."""
    body, status = _body(done)
    response = _Response(status, new_id("req"), msgspec.Raw(body))
    text = encode(_Line(_line_id(), done.custom_id, response, None))
    return answer_of(done.line, status, body, text)


def answer_of(line: int, status: int, body: bytes, text: bytes) -> LineAnswer:
    """Return the answer whose line of the output is `text`, which contains `body`."""
    used = _used(body)
    cached = used.prompt_tokens_details or used.input_tokens_details or _Cached()
    reasoning = used.completion_tokens_details or used.output_tokens_details or _Reasoning()
    return LineAnswer(
        line,
        status != 200,
        used.prompt_tokens or used.input_tokens,
        cached.cached_tokens or 0,
        used.completion_tokens or used.output_tokens,
        reasoning.reasoning_tokens or 0,
        text,
    )


def _used(body: bytes) -> _Usage:
    """Return the usage. A long body is decoded from its usage on: decoding all of it holds the GIL."""
    at = body.rfind(b'"usage":{') if len(body) > MIN_TAIL_DECODED_BYTES else -1
    if at >= 0:
        with suppress(msgspec.DecodeError):  # else the match lies within another member
            return decoder(_Used).decode(b"{" + body[at:]).usage or _Usage()
    return decoder(_Used).decode(body).usage or _Usage()


def _body(done: FinishedLine) -> tuple[bytes, int]:
    if isinstance(done.result, ApiError):
        return done.result.body(), done.result.status
    try:
        return done.result(), 200
    except Exception as error:
        failure = internal(new_id("req"))
        log.error("batch line %r: %s", done.custom_id, failure.message, exc_info=error)
        return failure.body(), failure.status


def unanswered(custom_id: str, why: Unanswered) -> bytes:
    """Return the error file's line for an input line that was never answered."""
    return encode(_Line(_line_id(), custom_id, None, BatchLineError(code=why, message=WHY[why])))


def _line_id() -> str:
    return new_id("batch_req").replace("-", "_")
