"""Chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Literal, Unpack, cast, overload

from tok_client import calls
from tok_client.blocking import BlockingTransport
from tok_client.bodies import Object
from tok_client.mapping.inputs import chats_of
from tok_client.mapping.iterate import AsyncMap, Map
from tok_client.mapping.options import ChatCompletionMapParams, MapOptions
from tok_client.mapping.run import MapRun
from tok_client.params import ChatCompletionParams, Conversation
from tok_client.streaming import AsyncStream, Stream
from tok_client.transport import Transport
from tok_client.types import ChatCompletion, ChatCompletionChunk


class AsyncChatCompletions:
    """`/chat/completions`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @overload
    async def create(
        self,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> ChatCompletion: ...

    @overload
    async def create(
        self,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> AsyncStream[ChatCompletionChunk]: ...

    @overload
    async def create(
        self,
        *,
        stream: bool,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]: ...

    async def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]:
        """Answers `messages`; with `stream`, gives an iterator of what the answer gains.

        The other parameters are those of the wire: see `ChatCompletionRequest`. What is not given is not sent.
        `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as it is.
        """
        if stream:
            return await self._transport.stream(calls.chat_completion_stream(params, extra_body), timeout)
        return await self._transport.fetch(calls.chat_completion(params, extra_body), timeout)

    def map(
        self,
        conversations: Iterable[Conversation] | AsyncIterable[Conversation],
        *,
        key: Callable[[Conversation], str] | None = None,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionMapParams],
    ) -> AsyncMap[Conversation, ChatCompletion]:
        """Answers all of `conversations`, of which there may be millions, many at a time.

        See `AsyncMap` for the results, `MapOptions` for how it goes about it; `key` makes a key for each, by which an
        output is gone on with. The other parameters are those of `create`.
        """
        options, rest = MapOptions.split(cast(Object, params))
        make = chats_of(rest, extra_body)
        return AsyncMap(MapRun(self._transport, conversations, make, key, options, timeout))


class ChatCompletions:
    """`/chat/completions`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    @overload
    def create(
        self,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> ChatCompletion: ...

    @overload
    def create(
        self,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> Stream[ChatCompletionChunk]: ...

    @overload
    def create(
        self,
        *,
        stream: bool,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> ChatCompletion | Stream[ChatCompletionChunk]: ...

    def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """Answers `messages`; with `stream`, gives an iterator of what the answer gains.

        The other parameters are those of the wire: see `ChatCompletionRequest`. What is not given is not sent.
        `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as it is.
        """
        if stream:
            return self._transport.stream(calls.chat_completion_stream(params, extra_body), timeout)
        return self._transport.fetch(calls.chat_completion(params, extra_body), timeout)

    def map(
        self,
        conversations: Iterable[Conversation] | AsyncIterable[Conversation],
        *,
        key: Callable[[Conversation], str] | None = None,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionMapParams],
    ) -> Map[Conversation, ChatCompletion]:
        """Answers all of `conversations`, of which there may be millions, many at a time.

        See `Map` for the results, `MapOptions` for how it goes about it; `key` makes a key for each, by which an
        output is gone on with. The other parameters are those of `create`.
        """
        options, rest = MapOptions.split(cast(Object, params))
        make = chats_of(rest, extra_body)
        return Map(
            MapRun(self._transport.transport, conversations, make, key, options, timeout), self._transport.thread
        )


class AsyncChat:
    """`/chat`."""

    def __init__(self, transport: Transport) -> None:
        self.completions = AsyncChatCompletions(transport)


class Chat:
    """`/chat`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self.completions = ChatCompletions(transport)
