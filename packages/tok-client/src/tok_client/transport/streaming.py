"""A streamed answer as an iterator of chunks, async or blocking."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Self, TypeVar, get_args

import msgspec

from tok_client.decoders import decoder
from tok_client.errors import DECODE_ERRORS, APIConnectionError, TokError, event_error, translate_errors
from tok_client.transport.call import Call
from tok_client.transport.loop_thread import LoopThread
from tok_client.transport.sse import ServerSentEvent, SSEDecoder

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_DRAIN_SECONDS = 0.2  # upper bound on the wait for the end of the body after the last chunk


class AsyncStream(Generic[T_co]):
    """The chunks of a streamed answer as they arrive. Closing it early disconnects, which ends the request.

    Use it as an async context manager, or read it to its end; it also closes when it is garbage-collected. `request_id`
    is the header x-request-id.

    Iterating raises StreamError if the server reports an error, and APIResponseError if an event cannot be decoded,
    both after the preceding chunks. It raises APITimeoutError if nothing arrives for `timeout` seconds, and
    APIConnectionError if the stream ends before its [DONE]. If the connection is reset, chunks not yet read may be
    lost.
    """

    def __init__(self, response: aiohttp.ClientResponse, call: Call[T_co]) -> None:
        self.request_id = response.headers.get("x-request-id")
        self._response = response
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._events = SSEDecoder()
        self._chunks = decoder(call.kind)
        self._lenient = call.lenient
        self._final_types = call.final_types
        self._tags = _tags(call.kind) if call.final_types else frozenset()
        self._ready: deque[T_co] = deque()
        self._done = False  # the last chunk has arrived: [DONE], or a chunk of a type in `final_types`
        self._failure: TokError | None = None  # raised after the preceding chunks

    @property
    def closed(self) -> bool:
        """Return whether no further chunk will be received."""
        return self._closed

    async def read(self) -> list[T_co]:
        """Return the chunks that arrive next: at least one, or none at the end."""
        chunks: list[T_co] = []
        while not chunks and not self._closed:
            if self._failure is not None:
                self.abandon()
                raise self._failure
            if self._done:
                await self._finish()
            else:
                chunks = self._take(await self._receive())
        return chunks

    def abandon(self) -> None:
        """Disconnect, unless the stream was read to its end. Call this on the client's event loop."""
        self._closed = True
        self._response.close()

    def break_off(self, reason: str) -> None:
        """Disconnect; the next read raises APIConnectionError, unless all chunks have arrived."""
        if not self._done:
            self._failure = APIConnectionError(reason)
        self._response.close()

    async def close(self) -> None:
        """Disconnect, unless the stream was read to its end. Idempotent."""
        self.abandon()
        self._ready.clear()

    async def _receive(self) -> bytes:
        try:
            with translate_errors(self._response.url):
                data = await self._response.content.readany()
        except TokError:
            self.abandon()
            raise
        if not data:
            self._failure = APIConnectionError("the stream ended before its [DONE]")
        return data

    def _take(self, data: bytes) -> list[T_co]:
        chunks: list[T_co] = []
        try:
            for event in self._events.feed(data):
                if event.data == b"[DONE]":
                    self._done = True
                    break
                chunk = self._decode(event)
                if chunk is not None:
                    chunks.append(chunk)
                if isinstance(chunk, self._final_types):
                    self._done = True
                    break
        except TokError as failure:
            self._failure = failure
        return chunks

    def _decode(self, event: ServerSentEvent) -> T_co | None:
        """Return the chunk; None if its type is unknown."""
        if event.event == "error":
            raise event_error(event.data)
        try:
            return decoded(event.data, self._chunks, self._lenient)
        except DECODE_ERRORS as error:
            if self._final_types and event.event not in self._tags and event.event != "message":
                return None
            raise event_error(event.data) from error

    async def _finish(self) -> None:
        """Read to the end of the body, so that the connection can be reused; waits at most _DRAIN_SECONDS."""
        self._closed = True
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                with translate_errors(self._response.url):
                    while await self._response.content.readany():
                        pass  # bytes after the last chunk are ignored
                    self._response.release()
        except (TimeoutError, APIConnectionError):
            pass  # the answer is complete; only the connection is lost
        finally:
            self._response.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        if not self._ready:
            self._ready.extend(await self.read())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if not self._closed:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._response.close)


def decoded(data: bytes, decoder: msgspec.json.Decoder[T], lenient: Callable[[bytes], T] | None) -> T:
    """Decode JSON; if it does not match the decoder's type, decode it with `lenient`. Errors: MsgspecError."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        if lenient is None:
            raise
        return lenient(data)


def _tags(kind: object) -> frozenset[str]:
    """Return the `type` tags of a union of chunk types."""
    return frozenset(str(one.__struct_config__.tag) for one in get_args(kind))


class Stream(Generic[T_co]):
    """The chunks of a streamed answer as they arrive. Closing it early disconnects, which ends the request.

    Use it as a context manager, or read it to its end; it also closes when it is garbage-collected. It raises the
    errors of `AsyncStream`.
    """

    def __init__(self, source: AsyncStream[T_co], thread: LoopThread) -> None:
        self.request_id = source.request_id
        self._source = source
        self._thread = thread
        self._ready: deque[T_co] = deque()

    @property
    def closed(self) -> bool:
        """Return whether no further chunk will be received."""
        return self._source.closed

    def close(self) -> None:
        """Disconnect, unless the stream was read to its end. Idempotent."""
        self._ready.clear()
        if not self._source.closed and not self._thread.stopped:
            self._thread.call(self._source.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        if not self._ready and not self._source.closed:
            self._ready.extend(self._thread.call(self._source.read))  # a batch, so that threads switch only once for it
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._source.closed:
            self._thread.post(self._source.abandon)
