"""The async client, with resources that mirror the URLs of the API."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from tok_client.resources import (
    AsyncBatches,
    AsyncChat,
    AsyncCompletions,
    AsyncEmbeddings,
    AsyncFiles,
    AsyncModels,
    AsyncOperations,
    AsyncResponses,
)
from tok_client.transport import Backoff, Transport


class AsyncClient(AsyncOperations):
    """A client of an OpenAI-compatible server, for one event loop.

    timeout      seconds without any response from the server (while connecting, or between bytes received) until
                 APITimeoutError
    max_retries  upper bound on the retries of a request. Broken connections and the statuses 408, 409, 429 and 500 and
                 above, except 501, are retried. Timeouts and streams that have begun are not
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

    async def close(self) -> None:
        """Close all connections, including those of open streams. Idempotent."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
