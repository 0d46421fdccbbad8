"""Iterators over the results of a `map`, async and blocking."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Generic, Self, TypeVar

from tok_client.mapping.run import MapResult, MapRun
from tok_client.transport import LoopThread

P = TypeVar("P")
T = TypeVar("T")


class AsyncMap(Generic[P, T]):
    """The results of a `map`, for `async for`; the work begins with the first iteration.

    Prompts are taken from their iterable only when needed. Requests within the window continue while the caller handles
    a result. Use the map as an async context manager, or read it to its end. A half-read map that is garbage-collected
    ends by itself.

    Iterating raises the error of a prompt (unless `on_error` is "return"); errors of the prompts' iterable; OSError if
    the output cannot be written; and ValueError if the output belongs to other prompts or parameters.
    """

    def __init__(self, run: MapRun[P, T]) -> None:
        self._run = run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: deque[MapResult[P, T]] = deque()

    async def close(self) -> None:
        """End the run and disconnect open requests. Idempotent."""
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

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if self._loop is not None and not self._run.closed:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._run.abandon)


class Map(Generic[P, T]):
    """The results of a `map`; the work begins with the first iteration.

    It behaves as `AsyncMap` and runs on the client's thread. The iterable of prompts is not read on the caller's
    thread.
    """

    def __init__(self, run: MapRun[P, T], thread: LoopThread) -> None:
        self._run = run
        self._thread = thread
        self._started = False
        self._ready: deque[MapResult[P, T]] = deque()

    def close(self) -> None:
        """End the run and disconnect open requests. Idempotent."""
        self._ready.clear()
        if self._started and not self._run.closed and not self._thread.stopped:
            self._thread.call(self._run.close)
        self._run.closed = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MapResult[P, T]:
        if not self._ready and not self._run.closed:
            self._started = True
            self._ready.extend(self._thread.call(self._run.read))  # a batch, so that threads switch only once for it
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._started and not self._run.closed:
            self._thread.post(self._run.abandon)
