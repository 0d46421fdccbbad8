"""LineRunner: process the lines of one batch, and store each answer as soon as it is ready.

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
from tok_server.batch.execution.gate import EngineGate
from tok_server.batch.execution.poison_isolation import PoisonIsolation, PoisonRequest
from tok_server.batch.execution.shielding import run_in, uninterrupted
from tok_server.batch.storage import (
    Answers,
    FinishedLine,
    InputChanged,
    InputLine,
    LineAnswer,
    Totals,
    encode_line_answer,
    is_damage,
    parse_known_line,
    read_lines,
)
from tok_server.openai import ENDPOINTS, EndpointTask, ServedModel
from tok_server.wire import SERVER, ApiError, from_exception, internal, new_id, unavailable

log = logging.getLogger("tok.server")

T = TypeVar("T")

ANSWERS_PER_GROUP = 256  # maximum answers per commit
COMMIT_DELAY_SECONDS = 0.05  # seconds that an answer waits for others
LINES_PER_CHUNK = 64  # lines read ahead at a time
MAX_CHUNK_BYTES = 1 << 20  # bytes of lines after which a chunk ends early
MAX_ATTEMPTS = 4  # attempts at a line, after errors that may pass; deaths of the engine do not count
SAMPLES_AHEAD_FACTOR = 2  # samples under way, as a multiple of the engine's running samples
PAUSE_POLL_SECONDS = 0.1  # seconds between checks of `BatchResources.paused`
# First and longest wait, in seconds, between attempts to write answers; it doubles.
WRITE_RETRY_SECONDS, MAX_WRITE_RETRY_SECONDS = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class LineSource:
    """A validated file and its number of lines. Their length was checked at validation."""

    path: Path
    lines: int


@dataclass(frozen=True, slots=True)
class BatchResources:
    """Resources that all batches of a process share.

    store       executor with the one thread that owns all connections that write
    reader      threads that read files, parse bodies and encode answers
    background  threads for long work in the background: validating, writing output files
    paused      returns whether no further lines may begin now
    answered    numbers of lines answered: "completed" and "failed"
    """

    served: ServedModel
    budget: Budget
    gate: EngineGate
    store: Executor
    reader: Executor
    background: Executor
    paused: Callable[[], bool] = lambda: False
    poison_isolation: PoisonIsolation = field(default_factory=PoisonIsolation)
    answered: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _ParsedLine:
    """A line whose body has been parsed, or refused."""

    line: int
    custom_id: str
    task: EndpointTask | ApiError


class LineRunner:
    """Processing of one batch's lines for `tenant`. `totals` covers the answers stored so far."""

    def __init__(self, source: LineSource, answers: Answers, resources: BatchResources, tenant: str = "") -> None:
        self._source = source
        self._answers = answers
        self._resources = resources
        self._tenant = tenant
        self._done: list[tuple[FinishedLine, int]] = []  # each with its units of the budget
        self._changed = asyncio.Event()
        self._open = 0  # lines begun and not yet stored
        self._acquired = 0  # units of the budget
        self._all_begun = False
        self._ending = False  # no more retries for answers that cannot be stored at once
        self.totals = Totals()

    @property
    def in_flight(self) -> int:
        """Return the number of lines begun and not yet stored."""
        return self._open

    async def run(self) -> None:
        """Answer every line that has no answer. If cancelled, store the answers that are done.

        Answers stay in memory while they cannot be written, such as to a full disk; the budget limits their number.

        Errors: EngineClosed, which leaves the rest to another run; InputChanged; OSError, sqlite3.Error.
        """
        self.totals = await self._run_in_store(self._answers.totals)
        marks = await self._run_in_store(lambda: self._answers.answered(self._source.lines))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._store_answers())
                await self._begin_lines(marks, tasks)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            try:
                await self._store_rest()
            finally:
                self._release(self._acquired)  # units of lines that were cut short
                self._open = 0

    def _release(self, units: int) -> None:
        self._acquired -= units
        self._resources.budget.release(units)

    async def _begin_lines(self, marks: bytearray, tasks: asyncio.TaskGroup) -> None:
        """Begin every line that has no answer, as the budget allows."""
        chunks = self._chunks(marks)
        next_chunk = self._read(chunks)
        while chunk := await next_chunk:
            next_chunk = self._read(chunks)
            for parsed_line in chunk:
                await self._begin(parsed_line, tasks)
        self._all_begun = True
        self._changed.set()

    def _read(self, chunks: Iterator[list[_ParsedLine]]) -> asyncio.Future[list[_ParsedLine]]:
        return asyncio.get_running_loop().run_in_executor(self._resources.reader, next, chunks, [])

    def _chunks(self, marks: bytearray) -> Iterator[list[_ParsedLine]]:
        """Yield the parsed lines without an answer, in chunks. Runs in a thread: tokenising takes long."""
        chunk: list[_ParsedLine] = []
        size = 0
        for line in read_lines(self._source.path):
            if line.data is None or line.row >= len(marks) or marks[line.row]:
                continue
            chunk.append(self._parse_line(line))
            size += len(line.data)
            if len(chunk) >= LINES_PER_CHUNK or size >= MAX_CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _parse_line(self, line: InputLine) -> _ParsedLine:
        request = parse_known_line(self._source.path, line)
        prepare = ENDPOINTS.get(request.url)
        if prepare is None:
            raise InputChanged(
                f"line {line.number} of {self._source.path.name} has a different url than when it was validated"
            )
        try:
            return _ParsedLine(line.row, request.custom_id, prepare(bytes(request.body), self._resources.served))
        except ApiError as error:
            return _ParsedLine(line.row, request.custom_id, error)
        except Exception as error:
            return _ParsedLine(line.row, request.custom_id, _internal_error(error, request.custom_id))

    async def _begin(self, parsed_line: _ParsedLine, tasks: asyncio.TaskGroup) -> None:
        while self._resources.paused():
            await asyncio.sleep(PAUSE_POLL_SECONDS)
        task = parsed_line.task
        acquired = await self._resources.budget.acquire(1 if isinstance(task, ApiError) else task.samples)
        self._acquired += acquired
        self._open += 1
        if isinstance(task, ApiError):
            self._end(FinishedLine(parsed_line.line, parsed_line.custom_id, task), acquired)
        else:
            tasks.create_task(self._answer(parsed_line, task, acquired))

    async def _answer(self, parsed_line: _ParsedLine, task: EndpointTask, acquired: int) -> None:
        self._end(
            FinishedLine(parsed_line.line, parsed_line.custom_id, await self._compute(parsed_line, task)), acquired
        )

    async def _compute(self, parsed_line: _ParsedLine, task: EndpointTask) -> Callable[[], bytes] | ApiError:
        """Return the function that encodes the answer, or the error instead of one. Errors: EngineClosed."""
        try:
            return await self._resources.poison_isolation.compute(lambda: self._attempt(parsed_line, task))
        except PoisonRequest as error:
            log.error("batch line %r kills the engine: %s", parsed_line.custom_id, error.__cause__)
            message = "the engine died each time it computed this line, the last time without any other batch line"
            return ApiError(500, message, kind=SERVER, code="engine_died")

    async def _attempt(self, parsed_line: _ParsedLine, task: EndpointTask) -> Callable[[], bytes] | ApiError:
        """Compute a line; retry after errors that may pass. Returns as `_compute`. Errors: EngineClosed, EngineDead."""
        for _ in range(MAX_ATTEMPTS):
            try:
                await self._resources.gate.wait()
                while self._resources.paused():
                    await asyncio.sleep(PAUSE_POLL_SECONDS)
                return await task.compute(self._tenant)
            except ApiError as error:
                return error
            except (EngineClosed, EngineDead):
                raise
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                # An awaited task was cancelled, not this one. Ending here would leave the line without an answer.
                log.warning(
                    "computing batch line %r again: an operation that it waited for was cancelled",
                    parsed_line.custom_id,
                )
            except RequestFailed as error:
                return from_exception(error, parsed_line.custom_id)
            except EngineError as error:
                log.warning("computing batch line %r again: %s", parsed_line.custom_id, error)
            except Exception as error:
                return _internal_error(error, parsed_line.custom_id)
        return unavailable(f"this line was started {MAX_ATTEMPTS} times and never finished", "engine_unavailable")

    def _end(self, done: FinishedLine, acquired: int) -> None:
        self._done.append((done, acquired))
        self._changed.set()

    async def _store_answers(self) -> None:
        """Store answers as they come, in groups."""
        while self._open or not self._all_begun:
            await self._changed.wait()
            self._changed.clear()
            if len(self._done) < min(ANSWERS_PER_GROUP, self._open):
                await asyncio.sleep(COMMIT_DELAY_SECONDS)
            while self._done:
                await self._store_group()

    async def _store_group(self) -> None:
        group = self._done[:ANSWERS_PER_GROUP]
        del self._done[:ANSWERS_PER_GROUP]
        try:
            written = await uninterrupted(self._encode_and_commit(group))
            wait = WRITE_RETRY_SECONDS
            while written:
                log.error("answers of a batch stay in memory; next attempt to write them in %g seconds", wait)
                await asyncio.sleep(wait)  # if cancelled, drop them: only answers on disk count
                wait = min(2 * wait, MAX_WRITE_RETRY_SECONDS)
                written = await uninterrupted(self._commit(written))
        finally:
            self._open -= len(group)
            self._release(sum(acquired for _, acquired in group))

    async def _encode_and_commit(self, group: Sequence[tuple[FinishedLine, int]]) -> Sequence[LineAnswer]:
        written = await run_in(self._resources.reader, lambda: [encode_line_answer(done) for done, _ in group])
        return await self._commit(written)

    async def _commit(self, written: Sequence[LineAnswer]) -> Sequence[LineAnswer]:
        """Commit the answers. Return them if a retry may succeed. Errors: OSError, sqlite3.Error."""
        try:
            new = await self._run_in_store(lambda: self._answers.add(written))
        except (OSError, sqlite3.Error) as error:
            if self._ending or is_damage(error):
                raise
            log.error("cannot write answers of a batch: %s", error)
            return written
        self.totals = self.totals.plus(new)
        self._resources.answered.update("failed" if one.failed else "completed" for one in new)
        return ()

    async def _store_rest(self) -> None:
        """Store the answers that are done when a run is given up, without retries: they have been computed."""
        self._ending = True
        while self._done:
            await self._store_group()

    async def _run_in_store(self, function: Callable[[], T]) -> T:
        return await run_in(self._resources.store, function)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _internal_error(error: Exception, custom_id: str) -> ApiError:
    """Log a defect, and return the error that answers its line, so that the batch continues."""
    name = new_id("req")
    log.error("%s: batch line %r: %s", name, custom_id, error or type(error).__name__, exc_info=error)
    return internal(name)


def sample_budget(max_running: int) -> int:
    """Return the budget for an engine that runs `max_running` samples at once: enough that it never waits for one."""
    return SAMPLES_AHEAD_FACTOR * max_running
