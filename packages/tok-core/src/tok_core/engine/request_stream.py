"""RequestStream: read the deltas of one request within an event loop; Mailbox: notify the loop of new deltas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from tok_core.engine.core import EngineCore
from tok_core.engine.generation_requests import StreamedRequest
from tok_core.engine.open_requests import OpenRequest
from tok_core.outputs import Delta, Ending, RequestOutput, Timings, TokenLogprob
from tok_core.sampling_params import SamplingParams

MAX_WOKEN_STREAMS = 16  # per turn of the event loop


class RequestStream:
    """Deltas of one request while it runs: `async for delta in stream`, or the whole by `await stream.output()`.

    Deltas of its samples interleave. Reading raises EngineDead if a process dies. Call `abort` to stop before the end.
    """

    __slots__ = ("_core", "_flooded", "_left", "_loop", "_notified", "_queued", "_readers", "_request", "_unread")

    def __init__(self, core: EngineCore, request: OpenRequest, loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._loop = loop
        self._request = request
        self._readers: list[asyncio.Future[None]] = []  # of waiting tasks; cheaper than an asyncio.Event
        self._queued = False  # whether the stream is in the mailbox's queue, to be woken
        self._notified = False  # whether it was woken and has not called `take` since
        self._unread: deque[Delta] = deque()
        self._flooded: Callable[[], None] | None = None
        self._left = request.params.n  # samples whose last delta has not been read

    @property
    def request_id(self) -> str:
        """Return the id given, or the one generated."""
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return the prompt's token ids."""
        return self._request.prompt

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens reported so far, of all samples."""
        return self._request.output_tokens

    @property
    def first_token(self) -> float | None:
        """Return the time of the first token, on the monotonic clock."""
        return self._request.timings.first_token

    @property
    def timings(self) -> Timings:
        """Return the times of the request so far."""
        return self._request.timings

    @property
    def lengths(self) -> list[int]:
        """Return the numbers of tokens of the samples that have ended."""
        return self._request.lengths

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens found in the cache; known with the first delta."""
        return self._request.cached_tokens

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Return the prompt's log-probabilities, if the request asks for them; known with the first delta."""
        return self._request.prompt_logprobs()

    def weights_of(self, index: int, tokens: int) -> tuple[str, list[tuple[str, int]] | None]:
        """Return `weight_version` and `weight_spans`, as `Completion` has them, of a sample's first `tokens` tokens."""
        return self._request.weights_of(index, tokens)

    def abort(self, reason: Ending = "abort") -> None:
        """Abort the request, if it is open: unfinished samples finish with `reason`."""
        self._core.abort_all([self._request.rid], reason)

    def bound(self, max_bytes: int, flooded: Callable[[], None]) -> None:
        """Limit the memory of unread tokens, and keep no tokens that were read, so that `output` is unavailable.

        max_bytes  approximate limit of unread tokens and log-probabilities
        flooded    called on the event loop at each report while more is unread; it has to read the deltas or `abort`
        """
        assert isinstance(self._request, StreamedRequest), "only a request with stream=True has deltas to be read"
        self._request.bound(max_bytes)
        self._flooded = flooded

    def free(self) -> None:
        """Free the log-probabilities of an ended request in portions, in a thread; `output` is unavailable then."""
        self._request.free()

    async def output(self) -> RequestOutput:
        """Wait for the end of the request, and return all of it."""
        while self._left:
            await self._wait()
            self._read()
        return self._request.output()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._left:
            await self._wait()
            if self._unread:
                delta = self._unread.popleft()
                self._left -= delta.finish_reason is not None
                yield delta

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Yield the deltas in lists, each with all that are available."""
        while batch := await self.batch():
            yield batch

    async def batch(self) -> list[Delta]:
        """Return the next list of `batches`; an empty one after the last."""
        if not self._left:
            return []
        await self._wait()
        return self._read()

    def _read(self) -> list[Delta]:
        batch = list(self._unread)
        self._unread.clear()
        self._left -= sum(delta.finish_reason is not None for delta in batch)
        return batch

    async def _wait(self) -> None:
        """Wait until a delta is unread, or another reader has read the last one.

        Raises the request's error once all deltas before it have been read.
        """
        while self._left and not self._unread:
            if not self._notified:
                reader = self._loop.create_future()
                self._readers.append(reader)
                await reader
                continue  # another reader may have taken the deltas first
            error = self._request.error  # read before `take`, so that deltas before the error come first
            self._unread += self._request.take()
            self._notified = self._request.error is not None  # every further reader gets the error
            if error is not None and not self._unread:
                self.abort()  # a request whose tokens could not be detokenised is still open
                raise error

    def wake(self) -> None:
        """Wake the waiting readers."""
        self._queued, self._notified = False, True
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():  # else the reader was cancelled
                reader.set_result(None)


class Mailbox:
    """The streams of one event loop. A report wakes the loop once, however many streams it concerns.

    Requests that the loop submits within one turn are sent together at the end of the turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, core: EngineCore) -> None:
        self.loop = loop
        self.streams: dict[int, RequestStream] = {}  # by rid, until their requests have ended
        self._core = core
        self._sink = self.notify_owners  # one object for all requests, since `notify` calls each sink once
        self._sending = False
        self._queue: deque[RequestStream] = deque()  # streams with new deltas whose readers have not been woken
        self._waking = False

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None,
        *,
        stream: bool,
        tenant: str,
        cache_salt: str | None,
    ) -> RequestStream:
        """Submit a request of the loop. Raises as `EngineCore.submit` does."""
        if isinstance(prompt, list):
            prompt = prompt.copy()  # the caller's, who may change it
        request = self._core.submit(
            prompt, params, request_id, self._sink, stream=stream, later=True, tenant=tenant, cache_salt=cache_salt
        )
        if not self._sending:
            self._sending = True
            self.loop.call_soon(self._send)
        # Notifications cannot arrive before the stream is registered: they run on the loop, which is busy here.
        request_stream = self.streams[request.rid] = RequestStream(self._core, request, self.loop)
        return request_stream

    def notify_owners(self, requests: Sequence[OpenRequest]) -> None:
        """Notify the loop that the requests have new deltas; from any thread."""
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
        """Wake the readers of a few streams at a time: they all run in the loop's next turn, and delay other tasks."""
        for _ in range(min(MAX_WOKEN_STREAMS, len(self._queue))):
            self._queue.popleft().wake()
        self._waking = bool(self._queue)
        if self._waking:
            self.loop.call_soon(self._wake)

    def _send(self) -> None:
        self._sending = False
        self._core.flush()
