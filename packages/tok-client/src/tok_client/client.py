"""The blocking client: resources that mirror the URLs of the API."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Self, Unpack, overload

from tok_client.backoff import Backoff
from tok_client.loop_thread import LoopThread
from tok_client.params import (
    ChatCompletionParams,
    CompletionParams,
    Object,
    chat_completion_body,
    completion_body,
    model_path,
)
from tok_client.streaming import Stream
from tok_client.transport import Transport
from tok_client.types import ChatCompletion, ChatCompletionChunk, Completion, Model, ModelList


class Completions:
    """`/completions`."""

    def __init__(self, transport: Transport, thread: LoopThread) -> None:
        self._transport = transport
        self._thread = thread

    @overload
    def create(
        self,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion: ...

    @overload
    def create(
        self,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Stream[Completion]: ...

    @overload
    def create(
        self,
        *,
        stream: bool,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion | Stream[Completion]: ...

    def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion | Stream[Completion]:
        """Completes `prompt`; with `stream`, gives an iterator of what it gains.

        The other parameters are those of the wire: see `CompletionRequest`. What is not given is not
        sent. `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as
        it is.
        """
        body = completion_body(params, stream, extra_body)
        send = self._transport
        if stream:
            source = self._thread.call(lambda: send.stream("/completions", Completion, body=body, timeout=timeout))
            return Stream(source, self._thread)
        return self._thread.call(lambda: send.fetch("POST", "/completions", Completion, body=body, timeout=timeout))


class ChatCompletions:
    """`/chat/completions`."""

    def __init__(self, transport: Transport, thread: LoopThread) -> None:
        self._transport = transport
        self._thread = thread

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

        The other parameters are those of the wire: see `ChatCompletionRequest`. What is not given is not
        sent. `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as
        it is.
        """
        body = chat_completion_body(params, stream, extra_body)
        send = self._transport
        if stream:
            source = self._thread.call(
                lambda: send.stream("/chat/completions", ChatCompletionChunk, body=body, timeout=timeout)
            )
            return Stream(source, self._thread)
        return self._thread.call(
            lambda: send.fetch("POST", "/chat/completions", ChatCompletion, body=body, timeout=timeout)
        )


class Chat:
    """`/chat`."""

    def __init__(self, transport: Transport, thread: LoopThread) -> None:
        self.completions = ChatCompletions(transport, thread)


class Models:
    """`/models`."""

    def __init__(self, transport: Transport, thread: LoopThread) -> None:
        self._transport = transport
        self._thread = thread

    def list(self, *, timeout: float | None = None) -> ModelList:
        """The models that the server has."""
        send = self._transport
        return self._thread.call(lambda: send.fetch("GET", "/models", ModelList, timeout=timeout))

    def retrieve(self, model: str, *, timeout: float | None = None) -> Model:
        """The model with the id `model`. NotFoundError: there is none."""
        send, path = self._transport, model_path(model)
        return self._thread.call(lambda: send.fetch("GET", path, Model, timeout=timeout))


class Client:
    """A client of an OpenAI-compatible server, for any number of threads.

    timeout      seconds without a sign of the server (connecting, or between bytes received) until APITimeoutError
    max_retries  most retries of a request whose connection broke or whose status is 408, 409, 429 or at least 500;
                 none once a stream has begun, nor after a timeout
    backoff      how long to wait before a retry

    Connections are served by an event loop on a thread of its own. Close it, or use it as a context manager;
    one that is dropped closes itself. Its calls raise the exceptions of `tok_client.errors`. ValueError: an
    argument is not allowed.
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
        self._thread = LoopThread(self._transport.close)
        self.completions = Completions(self._transport, self._thread)
        self.chat = Chat(self._transport, self._thread)
        self.models = Models(self._transport, self._thread)

    def close(self) -> None:
        """Closes all connections, those of open streams too, and ends the thread. May be called again."""
        self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
