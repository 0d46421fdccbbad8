"""Chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Literal, Unpack, overload

from tok_client.mapping import AsyncMap, ChatCompletionMapParams, Map, chats_of
from tok_client.requests import CHAT, ChatCompletionParams, Conversation, Object
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.transport import AsyncStream, BlockingTransport, Stream, Transport
from tok_client.types import ChatCompletion, ChatCompletionChunk


class AsyncChatCompletions(AsyncResource):
    """`/chat/completions`."""

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
        return await self._generate(CHAT, params, extra_body, timeout, stream=stream)

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
        return self._map(conversations, chats_of, key, params, extra_body, timeout)


class ChatCompletions(Resource):
    """`/chat/completions`."""

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
        return self._generate(CHAT, params, extra_body, timeout, stream=stream)

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
        return self._map(conversations, chats_of, key, params, extra_body, timeout)


class AsyncChat:
    """`/chat`."""

    def __init__(self, transport: Transport) -> None:
        self.completions = AsyncChatCompletions(transport)


class Chat:
    """`/chat`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self.completions = ChatCompletions(transport)
