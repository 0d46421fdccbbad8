"""BatchRun: process one batch to its end; after a crash, repeat only what was not committed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from tok_client.types import Batch, BatchError
from tok_server.batch.execution.finish import FinishedBatch, finish
from tok_server.batch.execution.run import BatchResources, LineSource, Run
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

T = TypeVar("T")


class BatchRun:
    """Processing of one batch that has not ended.

    turns  semaphore that limits how many batches compute their lines at once
    most   maximum bytes of a line
    """

    def __init__(
        self,
        job: StoredJob,
        store: Store,
        place: DataDirectory,
        means: BatchResources,
        *,
        clock: Clock,
        quota: Quota,
        turns: asyncio.Semaphore,
        most: int,
    ) -> None:
        self._job = job
        self._store = store
        self._place = place
        self._means = means
        self._clock = clock
        self._quota = quota
        self._turns = turns
        self._most = most
        self._run: Run | None = None
        self._working: asyncio.Task[None] | None = None
        self._cut = False
        self._stopped = threading.Event()
        self._ended_early = asyncio.Event()

    @property
    def batch(self) -> Batch:
        """Return the batch as clients see it now."""
        if self._run is None or self._job.batch.status != "in_progress":
            return self._job.batch
        return states.with_totals(self._job, self._run.totals).batch

    @property
    def under_way(self) -> int:
        """Return the number of lines being computed now."""
        return 0 if self._run is None else self._run.under_way

    @property
    def overdue(self) -> bool:
        """Return whether the batch's deadline has passed and unfinished work can be cut short."""
        deadline = self._job.deadline
        over = deadline is not None and self._clock.now() >= deadline
        return over and self._job.batch.status in states.BEFORE_THE_END

    @property
    def progress(self) -> tuple[str, int]:
        """Return a value that changes whenever the batch makes progress."""
        counts = self.batch.request_counts
        return self._job.batch.status, counts.completed + counts.failed if counts else 0

    async def end_early(self, how: states.Early) -> None:
        """Cut the batch's work short; `live` then finishes it. No effect if it is finishing already."""
        before = self._job.batch.status
        await self._change(partial(states.end_early, how=how, now=self._wall()))
        self._ended_early.set()
        if before in states.BEFORE_THE_END and self._working is not None:
            self._cut = True
            self._stopped.set()
            self._working.cancel()

    def stop(self) -> None:
        """Make threads that work for the batch end soon. Call this before cancelling `live`."""
        self._stopped.set()

    async def wait(self, seconds: float) -> None:
        """Wait `seconds`, or less if the batch is ended early meanwhile."""
        self._ended_early.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended_early.wait(), seconds)

    async def live(self) -> None:
        """Process the batch to its end. May be called again after errors: EngineClosed, OSError, sqlite3.Error.

        A batch whose input or answers are missing or damaged ends as failed: no retry could repair them.
        """
        # The job may have been changed since it was read.
        self._job = await self._in(self._means.store, partial(self._store.any_job, self._job.batch.id))
        try:
            await self._live()
        except Exception as error:
            if (reason := self._unmendable(error)) is None:
                raise
            await self.fail(reason)
        await self._in(self._means.store, self._clear_up)

    async def _live(self) -> None:
        if self._job.open:
            await self._check_contents()
        if self._job.batch.status == "validating":
            await self._interruptible(self._validate())
        if self._job.batch.status == "in_progress":
            await self._interruptible(self._answer())
        if self._job.open:
            await self._finish()

    async def fail(self, error: BatchError) -> None:
        """End the batch as failed with this error. Its answers are kept in `lost/`."""
        await self._change(partial(states.failed, error=error, now=self._wall()))

    def _unmendable(self, error: Exception) -> BatchError | None:
        """Return the reason if `error` means that the batch can never succeed; else None."""
        input, id = self._source.path, self._job.batch.id
        if isinstance(error, FileNotFoundError) and not input.exists():
            message = f"The content of file {input.name!r} is gone."
            return BatchError(code="file_unreadable", message=message, param="input_file_id")
        if isinstance(error, InputChanged):
            message = f"The content of file {input.name!r} has changed since it was validated: {error}."
            return BatchError(code="file_unreadable", message=message, param="input_file_id")
        if is_damage(error):
            message = f"The answers so far cannot be read, and are kept for the operator as lost/{id}.sqlite: {error}."
            return BatchError(code="answers_damaged", message=message)
        return None

    async def _check_contents(self) -> None:
        """Raise an error if answers or input of an earlier process are damaged. Takes as long as reading them."""
        self._stopped.clear()
        path = self._place.answers(self._job.batch.id)
        if path.exists():
            await self._in(self._means.clerk, partial(check_database, path))
            self._quota.put(self._job.batch.id, path.stat().st_size)
        reads_input = self._job.batch.status == "in_progress" or states.missing(self._job) is not None
        if reads_input and self._job.digest:
            check = partial(check_digest, self._source.path, self._job.digest, self._stopped.is_set)
            await self._interruptible(self._in(self._means.clerk, check))

    def _clear_up(self) -> None:
        """Publish the output and remove the answers; keep the answers of a failed batch. Runs in the store's thread."""
        batch = self._job.batch
        for id in (batch.output_file_id, batch.error_file_id):
            if isinstance(id, str):
                self._place.blobs.publish(id)
        if batch.status == "failed":
            self._place.set_answers_aside(batch.id)
        else:
            remove_database(self._place.answers(batch.id))
        self._quota.remove(batch.id)

    async def _interruptible(self, work: Coroutine[object, object, None]) -> None:
        """Run `work` until it is done, or until `end_early` cuts it short."""
        self._cut = False
        self._stopped.clear()
        self._working = asyncio.create_task(work)
        try:
            await self._working
        except (asyncio.CancelledError, Stopped):
            task = asyncio.current_task()
            if not self._cut or (task is not None and task.cancelling()):
                raise
        finally:
            self._working = None

    async def _validate(self) -> None:
        look = partial(validate, self._source.path, {self._job.batch.endpoint}, self._most, self._stopped.is_set)
        found = await self._in(self._means.clerk, look)
        await self._change(partial(states.validated, found=found, now=self._wall()))

    async def _answer(self) -> None:
        async with self._turns:
            answers = await self._in(self._means.store, self._open_answers)
            try:
                self._run = Run(self._source, answers, self._means, self._job.owner)
                await self._run.run()
            finally:
                await self._in(self._means.store, answers.close)
        await self._change(partial(states.answered, now=self._wall()))

    async def _finish(self) -> None:
        self._stopped.clear()
        write = partial(finish, self._job, self._place, self._source, self._wall(), self._stopped.is_set)
        await self._end(await self._in(self._means.clerk, write))

    async def _end(self, found: FinishedBatch) -> None:
        ids = [None if file is None else file.id for file in (found.output, found.errors)]
        change = partial(states.finished, totals=found.totals, output=ids[0], errors=ids[1], now=self._wall())
        keep, id = self._job.keep_seconds, self._job.batch.id
        deadline = None if keep is None else self._clock.now() + keep

        def end() -> StoredJob:
            try:
                job = self._store.change(id, change, found.files, deadline)
            except BaseException:
                for file in found.files:
                    self._place.blobs.discard(file.id)
                raise
            for file in found.files:
                self._place.blobs.publish(file.id)  # in the same call as `change`: no other call sees one alone
                self._quota.put(file.id, file.bytes)
            return job

        self._job = await self._in(self._means.store, end)

    @property
    def _source(self) -> LineSource:
        return LineSource(self._place.blobs.path(self._job.batch.input_file_id), self._job.lines)

    def _open_answers(self) -> Answers:
        id = self._job.batch.id
        return Answers(self._place.answers(id), id, partial(self._quota.add, id))

    async def _change(self, change: Callable[[StoredJob], StoredJob]) -> None:
        id = self._job.batch.id
        self._job = await self._in(self._means.store, lambda: self._store.change(id, change))

    def _wall(self) -> int:
        """Return the seconds since 1970, as reported to clients."""
        return int(self._clock.wall())

    async def _in(self, executor: Executor, function: Callable[[], T]) -> T:
        # If cancelled, the function still runs to its end: a thread cannot be stopped halfway.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(executor, function))
