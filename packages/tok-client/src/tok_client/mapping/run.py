"""Run a `map`: a sliding window of requests over the prompts, with bounds on open requests and held prompts."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import Generic, TypeVar, cast

import msgspec

from tok_client.errors import TokError
from tok_client.mapping.options import MapOptions
from tok_client.mapping.output import Output, digest
from tok_client.mapping.progress import MappingProgress
from tok_client.mapping.source import Source
from tok_client.transport import Call, Transport, check_timeout

P = TypeVar("P")
T = TypeVar("T")
P_co = TypeVar("P_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

_HELD_FACTOR = 4  # held prompts as a multiple of open requests, so that one slow request does not stall the window


class MapResult(msgspec.Struct, Generic[P_co, T_co], frozen=True, kw_only=True):
    """A prompt, its number in the input (from 0), its key if the run has keys, and its answer or error.

    `error` is a TokError, or the ValueError or TypeError of a prompt that cannot be sent.
    """

    index: int
    prompt: P_co
    key: str | None = None
    answer: T_co | None = None
    error: Exception | None = None

    def result(self) -> T_co:
        """Return the answer; raise the error if there is none."""
        if self.answer is None:
            raise self.error or ValueError("the result has neither an answer nor an error")
        return self.answer


class MapRun(Generic[P, T]):
    """A run that answers all of `prompts`, each by the call that `make` returns. It begins with the first `read`.

    key  returns a prompt's key; with keys, a run can continue an output file even if the order of the prompts has
         changed

    ValueError: an argument is not allowed.
    """

    def __init__(
        self,
        transport: Transport,
        prompts: Iterable[P] | AsyncIterable[P],
        make: Callable[[P], Call[T]],
        key: Callable[[P], str] | None,
        options: MapOptions,
        timeout: float | None,
    ) -> None:
        self._transport = transport
        self._source = Source(prompts)
        self._make = make
        self._key = key
        self._options = options
        self._timeout = timeout if timeout is None else check_timeout(timeout)
        self._open = asyncio.Semaphore(options.concurrency)
        self._held = asyncio.Semaphore(options.concurrency * _HELD_FACTOR)
        self._progress = MappingProgress(sys.stderr if options.progress else None, self._source.total)
        self._output: Output | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = self._read_all = False
        self._index = self._position = self._next_position = 0
        self._out_of_order: dict[int, MapResult[P, T]] = {}  # by position; they wait for the results before them
        self._ready: deque[MapResult[P, T]] = deque()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self.closed = False

    async def read(self) -> list[MapResult[P, T]]:
        """Return the next results: at least one, or none at the end.

        Raises the error that ends the run once the results before it have been returned.
        """
        if self.closed:
            return []
        if not self._started:
            self._started = True
            self._spawn(self._pump())
        while not self._ready and self._failure is None and (self._tasks or not self._read_all):
            self._changed.clear()
            await self._changed.wait()
        results = self._pop_ready()
        if not results:
            await self.close()
            if self._failure is not None:
                raise self._failure
        return results

    def abandon(self) -> None:
        """End the run: disconnect and close the output. Call this on the client's event loop."""
        if self._started and not self.closed:
            self._progress.end()
        self.closed = True
        for task in (*self._tasks, *((self._syncing,) if self._syncing else ())):
            task.cancel()
        if self._output is not None:
            self._output.close()

    async def close(self) -> None:
        """As `abandon`, and wait until the open requests have ended. Idempotent."""
        if self._output is not None:
            await asyncio.to_thread(self._output.sync)
        self.abandon()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pop_ready(self) -> list[MapResult[P, T]]:
        results: list[MapResult[P, T]] = []
        while self._ready:
            error = self._ready[0].error
            if error is not None and self._options.on_error == "raise":
                self._failure = error
                self._ready.clear()
                break
            results.append(self._ready.popleft())
            self._held.release()
        return results

    async def _pump(self) -> None:
        if self._options.output is not None:
            self._output = Output(self._options.output, keyed=self._key is not None)
            await asyncio.to_thread(self._output.resume)
            self._syncing = asyncio.create_task(self._sync(self._output))
        while prompts := await self._source.take(self._options.concurrency):
            for prompt in prompts:
                await self._admit(prompt)
        self._read_all = True

    async def _admit(self, prompt: P) -> None:
        index, key = self._index, None if self._key is None else self._key(prompt)
        self._index += 1
        try:
            call = self._make(prompt)
        except (ValueError, TypeError) as error:
            await self._held.acquire()
            self._add_result(self._take_position(), MapResult(index=index, prompt=prompt, key=key, error=error))
            return
        if self._output is not None and self._output.answered.has(index, key, digest(call.body or b"")):
            self._progress.skipped += 1
            self._progress.update()
            return
        await self._held.acquire()
        await self._open.acquire()
        self._spawn(self._answer(self._take_position(), index, key, prompt, call))

    async def _answer(self, position: int, index: int, key: str | None, prompt: P, call: Call[T]) -> None:
        try:
            answer = await self._transport.fetch(call, self._timeout, self._options.max_retries)
        except TokError as error:
            self._add_result(position, MapResult(index=index, prompt=prompt, key=key, error=error))
        else:
            if self._output is not None:
                self._output.write(index, key, call.body or b"", cast(msgspec.Struct, answer))
            self._add_result(position, MapResult(index=index, prompt=prompt, key=key, answer=answer))
        finally:
            self._open.release()

    def _add_result(self, position: int, result: MapResult[P, T]) -> None:
        if result.error is None:
            self._progress.answered += 1
        else:
            self._progress.failed += 1
        self._progress.update()
        if self._options.ordered:
            self._out_of_order[position] = result
        else:
            self._ready.append(result)
        while self._next_position in self._out_of_order:
            self._ready.append(self._out_of_order.pop(self._next_position))
            self._next_position += 1
        self._changed.set()

    async def _sync(self, output: Output) -> None:
        while True:
            await asyncio.sleep(self._options.sync_seconds)
            try:
                await asyncio.to_thread(output.sync)
            except OSError as error:
                self._fail(error)

    def _take_position(self) -> int:
        self._position += 1
        return self._position - 1

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()
