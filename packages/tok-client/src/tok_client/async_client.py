"""The async client: resources that mirror the URLs of the API."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Self, Unpack, overload

from tok_client.backoff import Backoff
from tok_client.params import (
    ChatCompletionParams,
    CompletionParams,
    Object,
    chat_completion_body,
    completion_body,
    model_path,
)
from tok_client.streaming import AsyncStream
from tok_client.transport import Transport
from tok_client.types import ChatCompletion, ChatCompletionChunk, Completion, Model, ModelList


class AsyncCompletions:
    """`/completions`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @overload
    async def create(
        self,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion: ...

    @overload
    async def create(
        self,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> AsyncStream[Completion]: ...

    @overload
    async def create(
        self,
        *,
        stream: bool,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion | AsyncStream[Completion]: ...

    async def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion | AsyncStream[Completion]:
        """Completes `prompt`; with `stream`, gives an iterator of what it gains.

        The other parameters are those of the wire: see `CompletionRequest`. What is not given is not
        sent. `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as
        it is.
        """
        body = completion_body(params, stream, extra_body)
        if stream:
            return await self._transport.stream("/completions", Completion, body=body, timeout=timeout)
        return await self._transport.fetch("POST", "/completions", Completion, body=body, timeout=timeout)


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

        The other parameters are those of the wire: see `ChatCompletionRequest`. What is not given is not
        sent. `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as
        it is.
        """
        body = chat_completion_body(params, stream, extra_body)
        if stream:
            return await self._transport.stream("/chat/completions", ChatCompletionChunk, body=body, timeout=timeout)
        return await self._transport.fetch("POST", "/chat/completions", ChatCompletion, body=body, timeout=timeout)


class AsyncChat:
    """`/chat`."""

    def __init__(self, transport: Transport) -> None:
        self.completions = AsyncChatCompletions(transport)


class AsyncModels:
    """`/models`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, timeout: float | None = None) -> ModelList:
        """The models that the server has."""
        return await self._transport.fetch("GET", "/models", ModelList, timeout=timeout)

    async def retrieve(self, model: str, *, timeout: float | None = None) -> Model:
        """The model with the id `model`. NotFoundError: there is none."""
        return await self._transport.fetch("GET", model_path(model), Model, timeout=timeout)


class AsyncClient:
    """A client of an OpenAI-compatible server, for one event loop.

    timeout      seconds without a sign of the server (connecting, or between bytes received) until APITimeoutError
    max_retries  most retries of a request whose connection broke or whose status is 408, 409, 429 or at least 500;
                 none once a stream has begun, nor after a timeout
    backoff      how long to wait before a retry

    Close it, or use it as an async context manager. Its calls raise the exceptions of `tok_client.errors`.
    ValueError: an argument is not allowed.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:10210/v1",
        api_key: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 2,
        *,
        backoff: Backoff | None = None,
    ) -> None:
        self._transport = Transport(base_url, api_key, timeout, max_retries, backoff or Backoff())
        self.completions = AsyncCompletions(self._transport)
        self.chat = AsyncChat(self._transport)
        self.models = AsyncModels(self._transport)

    async def close(self) -> None:
        """Closes all connections, those of open streams too. May be called again."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
