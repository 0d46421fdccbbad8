"""A run over many prompts as an iterator of its results, async or not."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

from tok_client.mapping.result import MapResult
from tok_client.mapping.run import MapRun
from tok_client.transport import LoopThread

P = TypeVar("P")
T = TypeVar("T")


class AsyncMap(Generic[P, T]):
    """The results of a `map`, for `async for`; the work begins with the first.

    Prompts are taken from their iterable only as they are needed, and go on being answered, within the window, while
    a result is looked at. Use it as an async context manager, or read it to its end; one that is dropped half-read
    ends by itself.

    Iterating raises the error of a prompt (unless `on_error` is "return"); what the iterable of prompts raises; OSError
    where the output cannot be written; and ValueError where the output is not of the same prompts and parameters.
    """

    def __init__(self, run: MapRun[P, T]) -> None:
        self._run = run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: deque[MapResult[P, T]] = deque()

    async def close(self) -> None:
        """Ends the run: what is open is disconnected. May be called again."""
        self._ready.clear()
        await self._run.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MapResult[P, T]:
        self._loop = asyncio.get_running_loop()
        if not self._ready:
            self._ready.extend(await self._run.read())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if self._loop is not None and not self._run.closed:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._run.abandon)


class Map(Generic[P, T]):
    """The results of a `map`; the work begins with the first.

    As `AsyncMap`, on the client's thread: the iterable of prompts is read on another thread than the caller's.
    """

    def __init__(self, run: MapRun[P, T], thread: LoopThread) -> None:
        self._run = run
        self._thread = thread
        self._begun = False
        self._ready: deque[MapResult[P, T]] = deque()

    def close(self) -> None:
        """Ends the run: what is open is disconnected. May be called again."""
        self._ready.clear()
        if self._begun and not self._run.closed and not self._thread.stopped:
            self._thread.call(self._run.close)
        self._run.closed = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MapResult[P, T]:
        if not self._ready and not self._run.closed:
            self._begun = True
            self._ready.extend(self._thread.call(self._run.read))  # a batch: threads are switched once for it
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._begun and not self._run.closed:
            self._thread.post(self._run.abandon)
