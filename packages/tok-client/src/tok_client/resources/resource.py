"""Common base of resources: whole and streamed answers, and maps over many inputs."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import TypeVar, cast

from tok_client.mapping import AsyncMap, Map, MapOptions, MapRun
from tok_client.requests import CHAT, COMPLETION, Conversation, EmbeddingParams, Generation, Object, Prompt, calls
from tok_client.transport import AsyncStream, BlockingTransport, Call, Stream, Transport
from tok_client.types import ChatCompletion, Completion, EmbeddingList

A = TypeVar("A")
C = TypeVar("C")
P = TypeVar("P")

CallsOf = Callable[[Object, Object | None], Callable[[P], Call[A]]]
"""Function from the parameters and the extra body members to a function from an input to its call."""


class AsyncResource:
    """A group of endpoints of the API, for async code."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def _generate(
        self, endpoint: Generation[A, C], params: Object, extra: Object | None, timeout: float | None, *, stream: bool
    ) -> A | AsyncStream[C]:
        if stream:
            return await self._transport.stream(endpoint.streamed(params, extra), timeout)
        return await self._transport.fetch(endpoint.whole(params, extra), timeout)

    def _map(
        self,
        inputs: Iterable[P] | AsyncIterable[P],
        calls_of: CallsOf[P, A],
        key: Callable[[P], str] | None,
        params: Object,
        extra: Object | None,
        timeout: float | None,
    ) -> AsyncMap[P, A]:
        options, rest = MapOptions.split(params)
        return AsyncMap(MapRun(self._transport, inputs, calls_of(rest, extra), key, options, timeout))


class Resource:
    """A group of endpoints of the API, for blocking code."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def _generate(
        self, endpoint: Generation[A, C], params: Object, extra: Object | None, timeout: float | None, *, stream: bool
    ) -> A | Stream[C]:
        if stream:
            return self._transport.stream(endpoint.streamed(params, extra), timeout)
        return self._transport.fetch(endpoint.whole(params, extra), timeout)

    def _map(
        self,
        inputs: Iterable[P] | AsyncIterable[P],
        calls_of: CallsOf[P, A],
        key: Callable[[P], str] | None,
        params: Object,
        extra: Object | None,
        timeout: float | None,
    ) -> Map[P, A]:
        options, rest = MapOptions.split(params)
        transport, thread = self._transport.transport, self._transport.thread
        return Map(MapRun(transport, inputs, calls_of(rest, extra), key, options, timeout), thread)


def completions_of(params: Object, extra: Object | None) -> Callable[[Prompt], Call[Completion]]:
    """Return a function from a prompt to its completion call. ValueError, TypeError: a parameter cannot be sent."""
    return _checked(lambda prompt: COMPLETION.whole({**params, "prompt": prompt}, extra), "")


def chats_of(params: Object, extra: Object | None) -> Callable[[Conversation], Call[ChatCompletion]]:
    """Return a function from a conversation to its chat call; a text becomes one user message.

    ValueError, TypeError: a parameter cannot be sent.
    """

    def call(conversation: Conversation) -> Call[ChatCompletion]:
        text = isinstance(conversation, str)
        messages = [{"role": "user", "content": conversation}] if text else conversation
        return CHAT.whole({**params, "messages": messages}, extra)

    return _checked(call, "")


def embeddings_of(params: Object, extra: Object | None) -> Callable[[Prompt], Call[EmbeddingList]]:
    """Return a function from an input to its embedding call. ValueError, TypeError: a parameter cannot be sent."""
    return _checked(lambda prompt: calls.embedding(prompt, cast(EmbeddingParams, params), extra), "")


def _checked(make: Callable[[P], Call[A]], example: P) -> Callable[[P], Call[A]]:
    """Return `make` after one trial call, so that bad parameters raise once rather than for each prompt."""
    make(example)
    return make
