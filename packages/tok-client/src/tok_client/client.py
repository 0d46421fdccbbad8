"""The async and the blocking client. Their resources mirror the URLs of the API."""

from __future__ import annotations

from typing import Self

from tok_client.resources import (
    RL,
    AsyncBatches,
    AsyncChat,
    AsyncCompletions,
    AsyncEmbeddings,
    AsyncFiles,
    AsyncModels,
    AsyncOperations,
    AsyncResponses,
    AsyncRL,
    Batches,
    Chat,
    Completions,
    Embeddings,
    Files,
    Models,
    Operations,
    Responses,
)
from tok_client.transport import Backoff, BlockingTransport, LoopThread, Transport


class AsyncClient(AsyncOperations):
    """A client of an OpenAI-compatible server, for one event loop.

    base_url     URL of the API, such as "http://host:port/v1"; "/v1" may be left out after the host
    timeout      seconds without any response from the server (while connecting, or between bytes received) until
                 APITimeoutError
    max_retries  upper bound on the retries of a request. Broken connections and the statuses 408, 409, 429 and 500 and
                 above, except 501, are retried. Timeouts and streams that have begun are not retried
    backoff      how long to wait before a retry

    All calls share one connection pool. Close the client, or use it as an async context manager. Calls raise the
    exceptions of `tok_client.errors`. ValueError: an argument is not allowed.
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
        super().__init__(Transport(base_url, api_key, timeout, max_retries, backoff or Backoff()))
        self.completions = AsyncCompletions(self._transport)
        self.chat = AsyncChat(self._transport)
        self.responses = AsyncResponses(self._transport)
        self.embeddings = AsyncEmbeddings(self._transport)
        self.files = AsyncFiles(self._transport)
        self.batches = AsyncBatches(self._transport)
        self.models = AsyncModels(self._transport)
        self.rl = AsyncRL(self._transport)

    async def close(self) -> None:
        """Close all connections, including those of open streams. Idempotent."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(Operations):
    """A client of an OpenAI-compatible server, for any number of threads.

    base_url     URL of the API, such as "http://host:port/v1"; "/v1" may be left out after the host
    timeout      seconds without any response from the server (while connecting, or between bytes received) until
                 APITimeoutError
    max_retries  upper bound on the retries of a request. Broken connections and the statuses 408, 409, 429 and 500 and
                 above, except 501, are retried. Timeouts and streams that have begun are not retried
    backoff      how long to wait before a retry

    All calls share one connection pool, served by an event loop on a separate thread. Close the client, or use it as a
    context manager; it also closes when it is garbage-collected. Calls raise the exceptions of `tok_client.errors`.
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
        transport = Transport(base_url, api_key, timeout, max_retries, backoff or Backoff())
        super().__init__(BlockingTransport(transport, LoopThread(transport.close)))
        self.completions = Completions(self._transport)
        self.chat = Chat(self._transport)
        self.responses = Responses(self._transport)
        self.embeddings = Embeddings(self._transport)
        self.files = Files(self._transport)
        self.batches = Batches(self._transport)
        self.models = Models(self._transport)
        self.rl = RL(self._transport)

    def close(self) -> None:
        """Close all connections, including those of open streams, and end the thread. Idempotent."""
        self._transport.thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
