"""The blocking client: resources that mirror the URLs of the API."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from tok_client.resources import Batches, Chat, Completions, Embeddings, Files, Models, Operations, Responses
from tok_client.transport import Backoff, BlockingTransport, LoopThread, Transport


class Client(Operations):
    """A client of an OpenAI-compatible server, for any number of threads.

    timeout      seconds without a sign of the server (connecting, or between bytes received) until APITimeoutError
    max_retries  most retries of a request whose connection broke or whose status is 408, 409, 429, or from 500 on
                 but for 501; none once a stream has begun, nor after a timeout
    backoff      how long to wait before a retry

    All its calls share one pool of connections, served by an event loop on a thread of its own. Close it, or use it as
    a context manager; one that is dropped closes itself. Its calls raise the exceptions of `tok_client.errors`.
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

    def close(self) -> None:
        """Closes all connections, those of open streams too, and ends the thread. May be called again."""
        self._transport.thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
