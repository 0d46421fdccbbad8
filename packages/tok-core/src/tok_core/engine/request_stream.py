"""RequestStream: the deltas of one request, read within an event loop; and how that loop hears of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from tok_core.engine.core import EngineCore
from tok_core.engine.requests import OpenRequest, StreamedRequest
from tok_core.outputs import Delta, Ending, RequestOutput, TokenLogprob
from tok_core.sampling_params import SamplingParams

WOKEN = 16  # streams that have news and are told of it in one turn of an event loop


class RequestStream:
    """The deltas of one request while it runs: `async for delta in stream`, or the whole by `await stream.output()`.

    Deltas of its samples interleave. Raises EngineDead if a process dies. Leaving early? Call `abort`.
    """

    __slots__ = ("_core", "_flooded", "_left", "_loop", "_news", "_queued", "_readers", "_request", "_unread")

    def __init__(self, core: EngineCore, request: OpenRequest, loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._loop = loop
        self._request = request
        self._readers: list[asyncio.Future[None]] = []  # who waits for news: an asyncio.Event costs more
        self._queued = False  # to be told that there is news
        self._news = False  # it has been told, and nothing taken since
        self._unread: deque[Delta] = deque()
        self._flooded: Callable[[], None] | None = None
        self._left = request.params.n  # samples whose last delta has not been read

    @property
    def request_id(self) -> str:
        """The id given, or one made for it."""
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt in tokens."""
        return self._request.prompt

    @property
    def output_tokens(self) -> int:
        """Tokens that have been made for it, as far as they have been told: of all its samples."""
        return self._request.output_tokens

    @property
    def first_token(self) -> float | None:
        """When its first token came, on the monotonic clock."""
        return self._request.timings.first_token

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache; known with the first delta."""
        return self._request.cached_tokens

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Of the prompt's tokens, where the request asks for them; known with the first delta."""
        return self._request.prompt_logprobs()

    def abort(self, reason: Ending = "abort") -> None:
        """Ends the request, if it still runs: samples that have not finished do so now, with `reason`."""
        self._core.abort_all([self._request.rid], reason)

    def bound(self, most: int, flooded: Callable[[], None]) -> None:
        """Keep nothing that has been read, so that there is no `output`; call `flooded` while more is unread.

        most  bytes of tokens and log-probabilities that may wait to be read, about. More may come all the same:
              `flooded`, called on the event loop at each report, is to read them or to `abort`.
        """
        assert isinstance(self._request, StreamedRequest), "only a request with stream=True has deltas to be read"
        self._request.bound(most)
        self._flooded = flooded

    def free(self) -> None:
        """Drop the log-probabilities of an aborted request, some at a time; there is no `output` then. For a thread."""
        self._request.free()

    async def output(self) -> RequestOutput:
        """Waits for the whole request."""
        while self._left:
            await self._wait()
            self._read()
        return self._request.output()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """The deltas, those together that were reported together."""
        while batch := await self.batch():
            yield batch

    async def batch(self) -> list[Delta]:
        """The next of `batches`; none after the last."""
        if not self._left:
            return []
        await self._wait()
        return self._read()

    async def _deltas(self) -> AsyncIterator[Delta]:
        while self._left:
            await self._wait()
            if self._unread:
                delta = self._unread.popleft()
                self._left -= delta.finish_reason is not None
                yield delta

    def _read(self) -> list[Delta]:
        batch = list(self._unread)
        self._unread.clear()
        for delta in batch:
            self._left -= delta.finish_reason is not None
        return batch

    async def _wait(self) -> None:
        """Returns when something is unread, or another has read the last of it. Raises the request's error when there
        is nothing before it."""
        while self._left and not self._unread:
            if not self._news:
                reader = self._loop.create_future()
                self._readers.append(reader)
                await reader
                continue  # another may have waited for it, too
            error = self._request.error  # before: what comes before it is then taken
            self._unread += self._request.take()
            self._news = self._request.error is not None  # that stays
            if error is not None and not self._unread:
                self.abort()  # it may be open still: what it took could not be made into text
                raise error

    def wake(self) -> None:
        """There is news for whoever waits."""
        self._queued, self._news = False, True
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():  # else it was cancelled
                reader.set_result(None)


class Mailbox:
    """The streams of one event loop, which is woken once a report however many of them have news.

    What the loop submits within one of its turns goes out together at the end of that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, core: EngineCore) -> None:
        self.loop = loop
        self.streams: dict[int, RequestStream] = {}  # by rid, until their requests have ended
        self._core = core
        self._sink = self.tell  # one object for all: they are told together
        self._sending = False
        self._queue: deque[RequestStream] = deque()  # those that have news and have not been woken
        self._waking = False

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None,
        *,
        stream: bool,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> RequestStream:
        """A new request of the loop. Raises as `EngineCore.submit` does."""
        request = self._core.submit(
            prompt, params, request_id, self._sink, stream=stream, later=True, tenant=tenant, cache_salt=cache_salt
        )
        if not self._sending:
            self._sending = True
            self.loop.call_soon(self._send)
        # What is told meanwhile waits: the loop runs this.
        found = self.streams[request.rid] = RequestStream(self._core, request, self.loop)
        return found

    def tell(self, requests: Sequence[OpenRequest]) -> None:
        """From any thread; a loop that has ended has nobody to tell."""
        with suppress(RuntimeError):  # the loop has been closed
            self.loop.call_soon_threadsafe(self._note, requests)

    def _note(self, requests: Sequence[OpenRequest]) -> None:
        for request in requests:
            find = self.streams.pop if request.ended() else self.streams.get
            stream = find(request.rid, None)
            if stream is not None and request.flooded and stream._flooded is not None:
                stream._flooded()
            if stream is not None and not stream._queued:
                stream._queued = True
                self._queue.append(stream)
        if self._queue and not self._waking:
            self._wake()

    def _wake(self) -> None:
        """A few at a time: whoever waits for one of them runs in the loop's next turn, and others wait for that."""
        for _ in range(min(WOKEN, len(self._queue))):
            self._queue.popleft().wake()
        self._waking = bool(self._queue)
        if self._waking:
            self.loop.call_soon(self._wake)

    def _send(self) -> None:
        self._sending = False
        self._core.flush()
