"""The endpoints that generate text: their answers come whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import msgspec

from tok_client.requests.bodies import Object, body_of
from tok_client.requests.open_items import open_event, open_response
from tok_client.transport import Call
from tok_client.types import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    Response,
    ResponseCompleted,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseRequest,
)

A = TypeVar("A")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Generation(Generic[A, C]):
    """An endpoint with its request and answer types; the other fields are those of `Call`.

    TypeError, ValueError: a parameter cannot be sent.
    """

    path: str
    request: Callable[..., msgspec.Struct]
    answer: type[A]
    chunk: type[C]
    final_types: tuple[type, ...] = ()
    lenient_answer: Callable[[bytes], A] | None = None
    lenient_chunk: Callable[[bytes], C] | None = None

    def whole(self, params: Object, extra: Object | None = None) -> Call[A]:
        """Return the call whose answer comes whole."""
        body = body_of(self.request, params, extra)
        return Call(method="POST", path=self.path, kind=self.answer, body=body, lenient=self.lenient_answer)

    def streamed(self, params: Object, extra: Object | None = None) -> Call[C]:
        """Return the call whose answer is streamed."""
        body = body_of(self.request, {**params, "stream": True}, extra)
        lenient = self.lenient_chunk
        return Call(
            method="POST", path=self.path, kind=self.chunk, body=body, final_types=self.final_types, lenient=lenient
        )


COMPLETION = Generation("/completions", CompletionRequest, Completion, Completion)
CHAT = Generation("/chat/completions", ChatCompletionRequest, ChatCompletion, ChatCompletionChunk)
RESPONSE = Generation(
    "/responses",
    ResponseRequest,
    Response,
    cast("type[ResponseEvent]", ResponseEvent),
    (ResponseCompleted, ResponseIncomplete, ResponseFailed),
    open_response,
    open_event,
)
