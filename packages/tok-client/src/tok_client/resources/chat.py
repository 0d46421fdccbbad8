"""Chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Literal, Unpack, overload

from tok_client.mapping import AsyncMap, ChatCompletionMapParams, Map
from tok_client.requests import CHAT, ChatCompletionCreateParams, ChatCompletionParams, Conversation, Object
from tok_client.resources.resource import AsyncResource, Resource, chats_of
from tok_client.transport import AsyncStream, BlockingTransport, Stream, Transport
from tok_client.types import ChatCompletion, ChatCompletionChunk


class AsyncChatCompletions(AsyncResource):
    """The `/chat/completions` endpoints."""

    @overload
    async def create(
        self, *, stream: Literal[False] = False, **params: Unpack[ChatCompletionCreateParams]
    ) -> ChatCompletion: ...

    @overload
    async def create(
        self, *, stream: Literal[True], **params: Unpack[ChatCompletionCreateParams]
    ) -> AsyncStream[ChatCompletionChunk]: ...

    @overload
    async def create(
        self, *, stream: bool, **params: Unpack[ChatCompletionCreateParams]
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]: ...

    async def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]:
        """Answer `messages`; with `stream`, return an iterator over the chunks of the answer.

        The other parameters are those of the API: see `ChatCompletionRequest`. Parameters not given are not sent.
        `timeout` (seconds) replaces the client's; the members of `extra_body` are added to the JSON body unchanged.
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
        """Answer all of `conversations`, possibly millions, with many requests open at a time.

        See `AsyncMap` for the results and `MapOptions` for the options. `key` returns a conversation's key, by which a
        later run continues an output file. The other parameters are those of `create`.
        """
        return self._map(conversations, chats_of, key, params, extra_body, timeout)


class ChatCompletions(Resource):
    """The `/chat/completions` endpoints."""

    @overload
    def create(
        self, *, stream: Literal[False] = False, **params: Unpack[ChatCompletionCreateParams]
    ) -> ChatCompletion: ...

    @overload
    def create(
        self, *, stream: Literal[True], **params: Unpack[ChatCompletionCreateParams]
    ) -> Stream[ChatCompletionChunk]: ...

    @overload
    def create(
        self, *, stream: bool, **params: Unpack[ChatCompletionCreateParams]
    ) -> ChatCompletion | Stream[ChatCompletionChunk]: ...

    def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ChatCompletionParams],
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """Answer `messages`; with `stream`, return an iterator over the chunks of the answer.

        The other parameters are those of the API: see `ChatCompletionRequest`. Parameters not given are not sent.
        `timeout` (seconds) replaces the client's; the members of `extra_body` are added to the JSON body unchanged.
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
        """Answer all of `conversations`, possibly millions, with many requests open at a time.

        See `Map` for the results and `MapOptions` for the options. `key` returns a conversation's key, by which a
        later run continues an output file. The other parameters are those of `create`.
        """
        return self._map(conversations, chats_of, key, params, extra_body, timeout)


class AsyncChat:
    """The `/chat` endpoints."""

    def __init__(self, transport: Transport) -> None:
        self.completions = AsyncChatCompletions(transport)


class Chat:
    """The `/chat` endpoints."""

    def __init__(self, transport: BlockingTransport) -> None:
        self.completions = ChatCompletions(transport)
