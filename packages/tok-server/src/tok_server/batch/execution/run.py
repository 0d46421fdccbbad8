"""Run: process the lines of one batch, and store each answer as soon as it is ready.

    reader thread: lines → parsed bodies ─► event loop: engine
    store thread: answers committed, in groups ◄─ reader thread: answers encoded ◄─┘

The budget limits the lines under way, so that memory does not grow with the file.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tok_core import EngineClosed, EngineDead, EngineError, RequestFailed
from tok_server.batch.execution.budget import Budget
from tok_server.batch.execution.gate import Gate
from tok_server.batch.execution.poison_isolation import PoisonIsolation, PoisonRequest
from tok_server.batch.execution.shielding import uninterrupted
from tok_server.batch.storage import (
    Answers,
    FinishedLine,
    InputChanged,
    InputLine,
    LineAnswer,
    Totals,
    is_damage,
    parse_known_line,
    read_lines,
    write,
)
from tok_server.openai import ENDPOINTS, EndpointTask, ServedModel
from tok_server.wire import SERVER, ApiError, from_exception, internal, new_id, unavailable

log = logging.getLogger("tok.server")

T = TypeVar("T")

GROUP = 256  # maximum answers per commit
GROUP_SECONDS = 0.05  # seconds that an answer waits for others
CHUNK = 64  # lines read ahead at a time
CHUNK_BYTES = 1 << 20  # bytes of lines after which a chunk ends early
ATTEMPTS = 4  # attempts at a line, after errors that may pass; deaths of the engine do not count
AHEAD = 2  # samples under way, as a multiple of the engine's running samples
PAUSE = 0.1  # seconds between checks of `BatchResources.paused`
KEEP_AGAIN, MAX_KEEP_AGAIN = 0.5, 30.0  # seconds, first and longest, between attempts to write answers; doubles


@dataclass(frozen=True, slots=True)
class LineSource:
    """A validated file and its number of lines. Their length was checked at validation."""

    path: Path
    lines: int


@dataclass(frozen=True, slots=True)
class BatchResources:
    """Resources that all batches of a process share.

    store     executor with the one thread that owns all connections that write
    reader    threads that read files, parse bodies and encode answers
    clerk     threads for long work in the background: validating, writing output files
    paused    returns whether no further lines may begin now
    answered  numbers of lines answered: "completed" and "failed"
    """

    served: ServedModel
    budget: Budget
    gate: Gate
    store: Executor
    reader: Executor
    clerk: Executor
    paused: Callable[[], bool] = lambda: False
    suspects: PoisonIsolation = field(default_factory=PoisonIsolation)
    answered: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A line whose body has been parsed, or refused."""

    line: int
    custom_id: str
    asked: EndpointTask | ApiError


class Run:
    """Processing of one batch's lines for `tenant`. `totals` covers the answers stored so far."""

    def __init__(self, source: LineSource, answers: Answers, means: BatchResources, tenant: str = "") -> None:
        self._source = source
        self._answers = answers
        self._means = means
        self._tenant = tenant
        self._done: list[tuple[FinishedLine, int]] = []  # each with its units of the budget
        self._news = asyncio.Event()
        self._open = 0  # lines begun and not yet stored
        self._taken = 0  # units of the budget
        self._fed = False
        self._ending = False  # no more retries for answers that cannot be stored at once
        self.totals = Totals()

    @property
    def under_way(self) -> int:
        """Return the number of lines begun and not yet stored."""
        return self._open

    async def run(self) -> None:
        """Answer every line that has no answer. If cancelled, store the answers that are done.

        Answers stay in memory while they cannot be written, such as to a full disk; the budget limits their number.

        Errors: EngineClosed, which leaves the rest to another run; InputChanged; OSError, sqlite3.Error.
        """
        self.totals = await self._in_store(self._answers.totals)
        marks = await self._in_store(lambda: self._answers.answered(self._source.lines))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep())
                await self._feed(marks, tasks)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            try:
                await self._keep_rest()
            finally:
                self._give(self._taken)  # units of lines that were cut short
                self._open = 0

    def _give(self, units: int) -> None:
        self._taken -= units
        self._means.budget.give(units)

    async def _feed(self, marks: bytearray, tasks: asyncio.TaskGroup) -> None:
        """Begin every line that has no answer, as the budget allows."""
        chunks = self._chunks(marks)
        coming = self._read(chunks)
        while chunk := await coming:
            coming = self._read(chunks)
            for ready in chunk:
                await self._begin(ready, tasks)
        self._fed = True
        self._news.set()

    def _read(self, chunks: Iterator[list[_Ready]]) -> asyncio.Future[list[_Ready]]:
        return asyncio.get_running_loop().run_in_executor(self._means.reader, next, chunks, [])

    def _chunks(self, marks: bytearray) -> Iterator[list[_Ready]]:
        """Yield the parsed lines without an answer, in chunks. Runs in a thread: tokenising takes long."""
        chunk: list[_Ready] = []
        size = 0
        for line in read_lines(self._source.path):
            if line.data is None or line.row >= len(marks) or marks[line.row]:
                continue
            chunk.append(self._understood(line))
            size += len(line.data)
            if len(chunk) >= CHUNK or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _understood(self, line: InputLine) -> _Ready:
        request = parse_known_line(self._source.path, line)
        prepare = ENDPOINTS.get(request.url)
        if prepare is None:
            raise InputChanged(
                f"line {line.number} of {self._source.path.name} has another url than when it was validated"
            )
        try:
            return _Ready(line.row, request.custom_id, prepare(bytes(request.body), self._means.served))
        except ApiError as error:
            return _Ready(line.row, request.custom_id, error)
        except Exception as error:
            return _Ready(line.row, request.custom_id, _unexpected(error, request.custom_id))

    async def _begin(self, ready: _Ready, tasks: asyncio.TaskGroup) -> None:
        while self._means.paused():
            await asyncio.sleep(PAUSE)
        asked = ready.asked
        taken = await self._means.budget.take(1 if isinstance(asked, ApiError) else asked.samples)
        self._taken += taken
        self._open += 1
        if isinstance(asked, ApiError):
            self._end(FinishedLine(ready.line, ready.custom_id, asked), taken)
        else:
            tasks.create_task(self._answer(ready, asked, taken))

    async def _answer(self, ready: _Ready, asked: EndpointTask, taken: int) -> None:
        self._end(FinishedLine(ready.line, ready.custom_id, await self._compute(ready, asked)), taken)

    async def _compute(self, ready: _Ready, asked: EndpointTask) -> Callable[[], bytes] | ApiError:
        """Return the function that encodes the answer, or the error instead of one. Errors: EngineClosed."""
        try:
            return await self._means.suspects.compute(lambda: self._attempt(ready, asked))
        except PoisonRequest as error:
            log.error("batch line %r ends the engine: %s", ready.custom_id, error.__cause__)
            message = "the engine died each time it computed this, the last time with no other line of a batch"
            return ApiError(500, message, kind=SERVER, code="engine_died")

    async def _attempt(self, ready: _Ready, asked: EndpointTask) -> Callable[[], bytes] | ApiError:
        """Compute a line; retry after errors that may pass. Returns as `_compute`. Errors: EngineClosed, EngineDead."""
        for _ in range(ATTEMPTS):
            try:
                await self._means.gate.passed()
                while self._means.paused():
                    await asyncio.sleep(PAUSE)
                return await asked.compute(self._tenant)
            except ApiError as error:
                return error
            except (EngineClosed, EngineDead):
                raise
            except asyncio.CancelledError:
                if _told_to_end():
                    raise
                # An awaited task was cancelled, not this one. Ending here would leave the line without an answer.
                log.warning("batch line %r is computed anew: what it waited for was cancelled", ready.custom_id)
            except RequestFailed as error:
                return from_exception(error, ready.custom_id)
            except EngineError as error:
                log.warning("batch line %r is computed anew: %s", ready.custom_id, error)
            except Exception as error:
                return _unexpected(error, ready.custom_id)
        return unavailable(f"this was begun {ATTEMPTS} times and never ended", "engine_unavailable")

    def _end(self, done: FinishedLine, taken: int) -> None:
        self._done.append((done, taken))
        self._news.set()

    async def _keep(self) -> None:
        """Store answers as they come, in groups."""
        while self._open or not self._fed:
            await self._news.wait()
            self._news.clear()
            if len(self._done) < min(GROUP, self._open):
                await asyncio.sleep(GROUP_SECONDS)
            while self._done:
                await self._keep_some()

    async def _keep_some(self) -> None:
        group = self._done[:GROUP]
        del self._done[:GROUP]
        try:
            written = await uninterrupted(self._keep_first(group))
            wait = KEEP_AGAIN
            while written:
                log.error("answers of a batch are kept in memory; the next try to write them is in %g seconds", wait)
                await asyncio.sleep(wait)  # if cancelled, drop them: only answers on disk count
                wait = min(2 * wait, MAX_KEEP_AGAIN)
                written = await uninterrupted(self._commit(written))
        finally:
            self._open -= len(group)
            self._give(sum(taken for _, taken in group))

    async def _keep_first(self, group: Sequence[tuple[FinishedLine, int]]) -> Sequence[LineAnswer]:
        written = await self._in(self._means.reader, lambda: [write(done) for done, _ in group])
        return await self._commit(written)

    async def _commit(self, written: Sequence[LineAnswer]) -> Sequence[LineAnswer]:
        """Commit the answers. Return them if a retry may succeed. Errors: OSError, sqlite3.Error."""
        try:
            new = await self._in_store(lambda: self._answers.add(written))
        except (OSError, sqlite3.Error) as error:
            if self._ending or is_damage(error):
                raise
            log.error("answers of a batch cannot be written: %s", error)
            return written
        self.totals = self.totals.plus(new)
        self._means.answered.update("failed" if one.failed else "completed" for one in new)
        return ()

    async def _keep_rest(self) -> None:
        """Store the answers that are done when a run is given up, without retries: they have been computed."""
        self._ending = True
        while self._done:
            await self._keep_some()

    async def _in_store(self, function: Callable[[], T]) -> T:
        return await self._in(self._means.store, function)

    async def _in(self, executor: Executor, function: Callable[[], T]) -> T:
        # If cancelled, the function still runs to its end: computed answers are to be stored.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(executor, function))


def _told_to_end() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _unexpected(error: Exception, custom_id: str) -> ApiError:
    """Log a defect, and return the error that answers its line, so that the batch continues."""
    name = new_id("req")
    log.error("%s: batch line %r: %s", name, custom_id, error or type(error).__name__, exc_info=error)
    return internal(name)


def sample_budget(max_running: int) -> int:
    """Return the budget for an engine that runs `max_running` samples at once: enough that it never waits for one."""
    return AHEAD * max_running
