"""BatchRun: process one batch to its end; after a crash, repeat only what was not committed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial

from tok_client.types import Batch, BatchError
from tok_server.batch.execution.finish import FinishedBatch, finish
from tok_server.batch.execution.line_runner import BatchResources, LineRunner, LineSource
from tok_server.batch.execution.shielding import run_in
from tok_server.batch.storage import (
    Answers,
    Clock,
    DataDirectory,
    InputChanged,
    Quota,
    Stopped,
    Store,
    StoredJob,
    check_database,
    check_digest,
    is_damage,
    remove_database,
    states,
    validate,
)


class BatchRun:
    """Processing of one batch that has not ended.

    computing_limit  semaphore that limits how many batches compute their lines at once
    max_line_bytes   maximum bytes of a line
    """

    def __init__(
        self,
        job: StoredJob,
        store: Store,
        data_directory: DataDirectory,
        resources: BatchResources,
        *,
        clock: Clock,
        quota: Quota,
        computing_limit: asyncio.Semaphore,
        max_line_bytes: int,
    ) -> None:
        self._job = job
        self._store = store
        self._data_directory = data_directory
        self._resources = resources
        self._clock = clock
        self._quota = quota
        self._computing_limit = computing_limit
        self._max_line_bytes = max_line_bytes
        self._line_runner: LineRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self._interrupted = False
        self._stopped = threading.Event()
        self._ended_early = asyncio.Event()

    @property
    def batch(self) -> Batch:
        """Return the batch as clients see it now."""
        if self._line_runner is None or self._job.batch.status != "in_progress":
            return self._job.batch
        return states.with_totals(self._job, self._line_runner.totals).batch

    @property
    def in_flight(self) -> int:
        """Return the number of lines being computed now."""
        return 0 if self._line_runner is None else self._line_runner.in_flight

    @property
    def overdue(self) -> bool:
        """Return whether the batch's deadline has passed and unfinished work can be cut short."""
        deadline = self._job.deadline
        passed = deadline is not None and self._clock.now() >= deadline
        return passed and self._job.batch.status in states.CANCELLABLE_STATUSES

    @property
    def progress(self) -> tuple[str, int]:
        """Return a value that changes whenever the batch makes progress."""
        counts = self.batch.request_counts
        return self._job.batch.status, counts.completed + counts.failed if counts else 0

    async def end_early(self, reason: states.EarlyEndReason) -> None:
        """Cut the batch's work short; `run` then finishes it. No effect if it is finishing already."""
        before = self._job.batch.status
        await self._change(partial(states.end_early, reason=reason, now=self._unix_time()))
        self._ended_early.set()
        if before in states.CANCELLABLE_STATUSES and self._task is not None:
            self._interrupted = True
            self._stopped.set()
            self._task.cancel()

    def stop(self) -> None:
        """Make threads that work for the batch end soon. Call this before cancelling `run`."""
        self._stopped.set()

    async def wait(self, seconds: float) -> None:
        """Wait `seconds`, or less if the batch is ended early meanwhile."""
        self._ended_early.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended_early.wait(), seconds)

    async def run(self) -> None:
        """Process the batch to its end. May be called again after errors: EngineClosed, OSError, sqlite3.Error.

        A batch whose input or answers are missing or damaged ends as failed: no retry could repair them.
        """
        # The job may have been changed since it was read.
        self._job = await run_in(self._resources.store, partial(self._store.job_of_any_owner, self._job.batch.id))
        try:
            await self._run_stages()
        except Exception as error:
            if (reason := self._permanent_failure(error)) is None:
                raise
            await self.fail(reason)
        await run_in(self._resources.store, self._clean_up)

    async def _run_stages(self) -> None:
        if self._job.open:
            await self._check_contents()
        if self._job.batch.status == "validating":
            await self._interruptible(self._validate())
        if self._job.batch.status == "in_progress":
            await self._interruptible(self._answer_lines())
        if self._job.open:
            await self._finish()

    async def fail(self, error: BatchError) -> None:
        """End the batch as failed with this error. Its answers are kept in `lost/`."""
        await self._change(partial(states.failed, error=error, now=self._unix_time()))

    def _permanent_failure(self, error: Exception) -> BatchError | None:
        """Return the reason if `error` means that the batch can never succeed; else None."""
        input, id = self._source.path, self._job.batch.id
        if isinstance(error, FileNotFoundError) and not input.exists():
            message = f"The content of file {input.name!r} is missing."
            return BatchError(code="file_unreadable", message=message, param="input_file_id")
        if isinstance(error, InputChanged):
            message = f"The content of file {input.name!r} has changed since it was validated: {error}."
            return BatchError(code="file_unreadable", message=message, param="input_file_id")
        if is_damage(error):
            message = f"The answers so far cannot be read; they are kept as lost/{id}.sqlite: {error}."
            return BatchError(code="answers_damaged", message=message)
        return None

    async def _check_contents(self) -> None:
        """Raise an error if answers or input of an earlier process are damaged. Takes as long as reading them."""
        self._stopped.clear()
        path = self._data_directory.answers(self._job.batch.id)
        if path.exists():
            await run_in(self._resources.background, partial(check_database, path))
            self._quota.put(self._job.batch.id, path.stat().st_size)
        reads_input = self._job.batch.status == "in_progress" or states.unanswered_reason(self._job) is not None
        if reads_input and self._job.digest:
            check = partial(check_digest, self._source.path, self._job.digest, self._stopped.is_set)
            await self._interruptible(run_in(self._resources.background, check))

    def _clean_up(self) -> None:
        """Publish the output and remove the answers; keep the answers of a failed batch. Runs in the store's thread."""
        batch = self._job.batch
        for id in (batch.output_file_id, batch.error_file_id):
            if isinstance(id, str):
                self._data_directory.blobs.publish(id)
        if batch.status == "failed":
            self._data_directory.set_answers_aside(batch.id)
        else:
            remove_database(self._data_directory.answers(batch.id))
        self._quota.remove(batch.id)

    async def _interruptible(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run `coroutine` until it is done, or until `end_early` cuts it short."""
        self._interrupted = False
        self._stopped.clear()
        self._task = asyncio.create_task(coroutine)
        try:
            await self._task
        except (asyncio.CancelledError, Stopped):
            task = asyncio.current_task()
            if not self._interrupted or (task is not None and task.cancelling()):
                raise
        finally:
            self._task = None

    async def _validate(self) -> None:
        check_lines = partial(
            validate, self._source.path, {self._job.batch.endpoint}, self._max_line_bytes, self._stopped.is_set
        )
        result = await run_in(self._resources.background, check_lines)
        await self._change(partial(states.validated, result=result, now=self._unix_time()))

    async def _answer_lines(self) -> None:
        async with self._computing_limit:
            answers = await run_in(self._resources.store, self._open_answers)
            try:
                self._line_runner = LineRunner(self._source, answers, self._resources, self._job.owner)
                await self._line_runner.run()
            finally:
                await run_in(self._resources.store, answers.close)
        await self._change(partial(states.answered, now=self._unix_time()))

    async def _finish(self) -> None:
        self._stopped.clear()
        write = partial(finish, self._job, self._data_directory, self._source, self._unix_time(), self._stopped.is_set)
        await self._end(await run_in(self._resources.background, write))

    async def _end(self, result: FinishedBatch) -> None:
        ids = [None if file is None else file.id for file in (result.output, result.errors)]
        change = partial(states.finished, totals=result.totals, output=ids[0], errors=ids[1], now=self._unix_time())
        keep, id = self._job.keep_seconds, self._job.batch.id
        deadline = None if keep is None else self._clock.now() + keep

        def end() -> StoredJob:
            try:
                job = self._store.change(id, change, result.files, deadline)
            except BaseException:
                for file in result.files:
                    self._data_directory.blobs.discard(file.id)
                raise
            for file in result.files:
                # In the same call as `change`: no other call sees one alone.
                self._data_directory.blobs.publish(file.id)
                self._quota.put(file.id, file.bytes)
            return job

        self._job = await run_in(self._resources.store, end)

    @property
    def _source(self) -> LineSource:
        return LineSource(self._data_directory.blobs.path(self._job.batch.input_file_id), self._job.lines)

    def _open_answers(self) -> Answers:
        id = self._job.batch.id
        return Answers(self._data_directory.answers(id), id, partial(self._quota.add, id))

    async def _change(self, change: Callable[[StoredJob], StoredJob]) -> None:
        id = self._job.batch.id
        self._job = await run_in(self._resources.store, lambda: self._store.change(id, change))

    def _unix_time(self) -> int:
        """Return the seconds since 1970, as reported to clients."""
        return int(self._clock.wall())
