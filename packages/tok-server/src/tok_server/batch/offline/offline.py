"""Offline: answer a file of requests without a server; a run can be resumed after any interruption.

OUT.jsonl           written at the end, atomically: every line of the input once, in its order
OUT.jsonl.partial   answers so far; deleted once OUT.jsonl is written
OUT.jsonl.lock      held while the run lasts
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Self

import msgspec

from tok_client.decoders import decoder
from tok_client.types import BatchError
from tok_core import AsyncEngine, InvalidField
from tok_server.batch.execution import (
    ANSWERS_PER_GROUP,
    BatchResources,
    Budget,
    EngineGate,
    LineRunner,
    LineSource,
    for_each_line,
    run_in,
    sample_budget,
)
from tok_server.batch.storage import (
    MAX_ERRORS,
    Answers,
    FileLock,
    LineAnswer,
    StoreError,
    Totals,
    atomic_write,
    line_answer,
    parse_line,
    read_lines,
    remove_database,
    validate,
)
from tok_server.openai import ENDPOINTS, ServedModel
from tok_server.settings import AUTO, Formats, Limits

MAX_LINE_BYTES = Limits().max_body  # bytes of a line, the same as of an HTTP body


class InvalidInput(Exception):
    """Input with invalid lines. `truncated`: the list of errors is full, so that there may be others."""

    def __init__(self, errors: list[BatchError]) -> None:
        super().__init__(f"{len(errors)} bad lines")
        self.errors = errors
        self.truncated = len(errors) >= MAX_ERRORS


class OfflineBatch:
    """One file to answer. A context manager that holds the output's lock: call `check`, then `answer`.

    model         name of the model: lines may ask for it, or for none
    retry_failed  compute the failed lines of an existing output of this input again

    Errors: InvalidField (file, output), StoreError (in use).
    """

    def __init__(self, file: Path, output: Path, model: str, *, retry_failed: bool = False) -> None:
        if not output.name or output == Path("-"):  # a run on standard output could not be resumed
            raise InvalidField("output", str(output), "the name of a file")
        self.partial = output.with_name(output.name + ".partial")
        self._file = file
        self._output = output
        self._model = model
        self._retry = retry_failed
        self._lock_path = output.with_name(output.name + ".lock")
        self._lock: FileLock | None = None
        self._store = ThreadPoolExecutor(1, "tok-batch-store")
        self._reader = ThreadPoolExecutor(1, "tok-batch-reader")
        self._digest = ""
        self._line_runner: LineRunner | None = None
        self.lines = 0
        self._ended = False

    @property
    def totals(self) -> Totals:
        """Return the totals of the answers so far."""
        return Totals() if self._line_runner is None else self._line_runner.totals

    def __enter__(self) -> Self:
        if not self._file.is_file():
            raise InvalidField("file", str(self._file), "an existing file")
        if not self._output.parent.is_dir():
            raise InvalidField("output", str(self._output), "a file in an existing directory")
        self._lock = FileLock(self._lock_path, str(self._output))
        try:
            self._check_output()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _check_output(self) -> None:
        exists, partial_exists = self._output.exists(), self.partial.exists()
        # Both exist if a run ended between writing the output and deleting the partial answers, or during a retry.
        if exists and not self._retry and not partial_exists:
            allowed = "a file that does not exist yet, or an output of the same input with --retry-failed"
            raise InvalidField("output", str(self._output), allowed)
        if self._retry and not exists and not partial_exists:
            raise InvalidField("retry_failed", True, f"only if {self._output} exists")

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for pool in (self._reader, self._store):
            pool.shutdown()
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            self._lock.close()

    async def check(self) -> None:
        """Validate all lines of the input. Errors: InvalidInput, before any line is run."""
        check_lines = partial(validate, self._file, ENDPOINTS.keys(), MAX_LINE_BYTES, lambda: self._ended)
        result = await run_in(self._reader, check_lines)
        if result.errors:
            raise InvalidInput(result.errors)
        self.lines, self._digest = result.lines, result.digest

    async def answer(self, engine: AsyncEngine, formats: Formats = AUTO) -> Totals:
        """Answer the remaining lines and write the output. Errors: StoreError, EngineError, OSError, sqlite3.Error."""
        source = LineSource(self._file, self.lines)
        answers = await run_in(self._store, self._open_answers)
        gate = EngineGate(engine, until_closed=False)
        try:
            if self._retry and self._output.exists():
                await run_in(self._store, lambda: self._import_successful(answers))
            budget = Budget(sample_budget(engine.info.max_running))
            served = ServedModel(engine, (self._model,), formats)
            self._line_runner = LineRunner(
                source, answers, BatchResources(served, budget, gate, self._store, self._reader, self._reader)
            )
            await self._line_runner.run()
            await run_in(self._store, lambda: self._write(source, answers))
        finally:
            gate.close()
            await run_in(self._store, answers.close)
        await run_in(self._store, lambda: remove_database(self.partial))
        return self._line_runner.totals

    def _open_answers(self) -> Answers:
        """Return the answers so far.

        To retry failed lines of an output that was written from these very answers, begin without any.
        """
        if self._retry and self._output.exists():  # before `_open` makes partial answers, beside which it is replaced
            for _ in successful_answers(self._output, LineSource(self._file, self.lines)):
                pass
        answers = self._open()
        try:
            written = self._retry and self._output.exists() and self._is_written(answers)
        except BaseException:
            answers.close()
            raise
        if not written:
            return answers
        answers.close()
        remove_database(self.partial)
        return self._open()

    def _is_written(self, answers: Answers) -> bool:
        """Return whether the output consists of exactly these answers."""
        with self._output.open("rb") as stream:
            pairs = zip_longest(answers.in_order(), stream)
            return all(one is not None and line == one.text + b"\n" for one, line in pairs)

    def _open(self) -> Answers:
        try:
            return Answers(self.partial, f"{self._digest} by {self._model}")
        except StoreError as error:
            raise StoreError(f"{error}; delete it to start over, or choose another --output") from error

    def _import_successful(self, answers: Answers) -> None:
        """Store the output's answers to lines that did not fail."""
        for group in successful_answers(self._output, LineSource(self._file, self.lines)):
            answers.add(group)

    def _write(self, source: LineSource, answers: Answers) -> None:
        try:
            with atomic_write(self._output) as stream:

                def write_line(text: bytes, _: bool) -> None:
                    stream.write(text + b"\n")

                for_each_line(source, answers, None, write_line, lambda: self._ended)
        except OSError as error:
            text = f"{self._output}: cannot be written: {error.strerror}; run the same command again to resume"
            raise StoreError(text) from error


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


def successful_answers(output: Path, source: LineSource) -> Iterator[list[LineAnswer]]:
    """Yield the answers of lines that did not fail, in groups. Errors: StoreError if the output is of another input."""
    group: list[LineAnswer] = []
    lines = 0
    with output.open("rb") as answers:
        for line, text in zip(read_lines(source.path), answers, strict=False):
            lines += 1
            answer = _read(text, output, lines)
            if line.data is None or answer.custom_id != parse_line(line.data).custom_id:
                raise StoreError(f"{output}: line {lines} is not an answer to line {line.number} of {source.path}")
            if answer.response is not None and answer.response.status_code == 200:
                group.append(line_answer(line.row, 200, bytes(answer.response.body), text.rstrip(b"\n")))
            if len(group) >= ANSWERS_PER_GROUP:
                yield group
                group = []
        extra_line = answers.readline()
    if lines != source.lines or extra_line:
        raise StoreError(f"{output}: has a different number of lines than {source.path}")
    yield group


def _read(text: bytes, output: Path, number: int) -> _Line:
    try:
        return decoder(_Line).decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{output}: line {number} is not an answer: {error}") from error
