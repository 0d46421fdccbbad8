"""BatchService: run all open batches of a server, and manage the files that they read and write."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tok_client.types import Batch, BatchError, FileObject
from tok_core import EngineClosed
from tok_server.batch.api.metrics import BatchStats
from tok_server.batch.execution import (
    BatchResources,
    BatchRun,
    Budget,
    EngineGate,
    PoisonIsolation,
    run_in,
    sample_budget,
)
from tok_server.batch.storage import (
    ENDED,
    NO_OWNER,
    Clock,
    DataDirectory,
    FileLock,
    Quota,
    Store,
    StoredJob,
    StoreError,
    check_index,
    is_full,
    recover,
    states,
)
from tok_server.openai import ServedModel

log = logging.getLogger("tok.server")

T = TypeVar("T")

MAX_OPEN_BATCHES = 1000  # batches that have not ended
MAX_COMPUTING_BATCHES = 8  # batches whose lines are computed at once
THREADS_PER_POOL = 2  # threads each for reading and for background work
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
TICK_SECONDS = 0.5  # seconds between checks for expired files and batches
START_POLL_SECONDS = 0.05  # seconds between checks whether the engine has started
RETRY_SECONDS, MAX_RETRY_SECONDS = 10.0, 600.0  # first and longest wait after errors that may pass; doubles
MAX_FULL_SECONDS = 60.0  # longest wait for space on a full disk
MAX_FAILURES = 8  # consecutive, without progress, after which a batch fails; a full disk does not count
SAVE_CLOCK_SECONDS = 60.0
DELETION_GRACE_SECONDS = 300.0  # after the start before any file is deleted: a mistaken start can be stopped in time


class TooManyBatches(Exception):
    """The maximum number of batches is open."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Maximum bytes of a file, of a line (the body of one request), and of all files and answers together."""

    file: int
    line: int
    quota: int | None = None


class BatchService:
    """Files and batches below one directory. Call `open` within an event loop, and `close` at the end.

    off     reason why the directory could not be opened, set by the caller of `open`; None: it could
    ready   returns whether the engine has started
    paused  returns whether no further lines may begin
    """

    def __init__(
        self,
        directory: Path,
        served: ServedModel,
        limits: BatchLimits,
        *,
        ready: Callable[[], bool] = lambda: True,
        paused: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        self.limits = limits
        self.clock = clock or Clock()
        self.quota = Quota(limits.quota)
        self.off: str | None = None
        self._directory = directory
        self._served = served
        self._ready = ready
        self._paused = paused
        self._runs: dict[str, BatchRun] = {}
        self._ended: Counter[str] = Counter()  # batches ended since the start, by status
        self._tasks: set[asyncio.Task[None]] = set()
        self._computing_limit = asyncio.Semaphore(MAX_COMPUTING_BATCHES)
        self._store_thread = ThreadPoolExecutor(1, "tok-batch-store")
        self._reader_threads = ThreadPoolExecutor(THREADS_PER_POOL, "tok-batch-reader")
        self._background_threads = ThreadPoolExecutor(THREADS_PER_POOL, "tok-batch-background")
        self._housekeeping: asyncio.Task[None] | None = None
        self._resources: BatchResources | None = None

    async def open(self) -> None:
        """Lock the directory, and complete what a crash interrupted. Errors: StoreError."""
        self.data_directory = await run_in(self._store_thread, lambda: DataDirectory(self._directory))
        self._lock = FileLock(self.data_directory.lock, f"data directory {self._directory}")
        try:
            await run_in(self._store_thread, self._open)
        except (OSError, sqlite3.Error) as error:
            self._lock.close()
            raise StoreError(f"data directory {self._directory}: cannot be used: {error}") from error
        except BaseException:
            self._lock.close()
            raise
        self._housekeeping = asyncio.create_task(self._run_housekeeping())

    def _open(self) -> None:
        """Open the store. Runs in the store's thread, which owns its connection."""
        check_index(self.data_directory)
        self._store = Store(self.data_directory.store)
        try:
            self.clock.start(self._store.clock())
            self._no_deletion_before = self.clock.now() + DELETION_GRACE_SECONDS
            self._store.save_clock(self.clock.reading())
            recover(self.data_directory, self._store)
            self._count_content()
        except BaseException:
            self._store.close()
            raise

    def _count_content(self) -> None:
        """Count existing content against the quota, and log how many files are about to be deleted."""
        for id, path, _ in self.data_directory.blobs.entries():
            self.quota.put(id, path.stat().st_size)
        for id in self.data_directory.answer_ids():
            if (path := self.data_directory.answers(id)).exists():
                self.quota.put(id, path.stat().st_size)
        if self.data_directory.lost.is_dir():
            self.quota.put("lost", sum(path.stat().st_size for path in self.data_directory.lost.iterdir()))
        if expired := len(self._store.expired(self.clock.now())):
            log.info("expired files, to be deleted in %g seconds: %d", DELETION_GRACE_SECONDS, expired)

    async def close(self) -> None:
        """Stop all batches. Computed answers are kept; open batches continue when the directory is next opened."""
        if self._housekeeping is None:
            return
        tasks = [self._housekeeping, *self._tasks]
        for run in self._runs.values():
            run.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._resources is not None:
            self._resources.gate.close()
        await run_in(self._store_thread, self._close_store)
        for pool in (self._reader_threads, self._background_threads, self._store_thread):
            await asyncio.to_thread(pool.shutdown)
        self._lock.close()

    def _close_store(self) -> None:
        try:
            self._store.save_clock(self.clock.reading())
        except sqlite3.Error as error:
            log.error("cannot save the clock of the data directory: %s", error)
        self._store.close()

    def now(self) -> int:
        """Return the seconds since 1970, as reported to clients."""
        return int(self.clock.wall())

    @property
    def in_flight(self) -> int:
        """Return the number of samples that the engine has received, or is about to receive."""
        return 0 if self._resources is None else self._resources.budget.used

    def stats(self) -> BatchStats:
        """Return how many batches and lines are in which state; none are open before the engine has started."""
        batches = [run.batch for run in self._runs.values()]
        statuses = Counter(batch.status for batch in batches)
        computing = [run for run in self._runs.values() if run.batch.status == "in_progress"]
        counts = [run.batch.request_counts for run in computing if run.batch.request_counts]
        running = sum(run.in_flight for run in computing)
        left = sum(one.total - one.completed - one.failed for one in counts)
        answered = Counter() if self._resources is None else self._resources.answered
        return BatchStats(
            open={status: statuses[status] for status in OPEN_STATUSES},
            ended={status: self._ended[status] for status in sorted(ENDED)},
            lines={"waiting": max(0, left - running), "running": running},
            answered={result: answered[result] for result in ("completed", "failed")},
        )

    async def run_with_store(self, function: Callable[[Store], T]) -> T:
        """Return the result of `function`, called with the store. Errors: those of `function`."""
        return await run_in(self._store_thread, lambda: function(self._store))

    async def add_file(self, file: FileObject, owner: str = NO_OWNER, seconds: int | None = None) -> None:
        """Add a file whose content has been written. `seconds`: time after which the file expires; None: never."""
        deadline = None if seconds is None else self.clock.now() + seconds

        def add(store: Store) -> None:
            store.add_file(file, owner, deadline)
            try:
                self.data_directory.blobs.publish(file.id)
            except BaseException:
                store.delete_files([file.id])
                raise

        await self.run_with_store(add)

    async def delete_file(self, id: str, owner: str = NO_OWNER) -> None:
        """Delete a file and its content. Errors: RecordNotFound, FileInUse, sqlite3.Error, OSError."""

        def delete(store: Store) -> None:
            store.check_unused(id, owner)
            self._delete(store, [id])

        await self.run_with_store(delete)

    def _delete(self, store: Store, ids: list[str]) -> None:
        """Delete these files, none of which is in use. After a crash each exists as a whole, or not at all."""
        blobs = self.data_directory.blobs
        for id in ids:
            blobs.withdraw(id)
        try:
            store.delete_files(ids)
        except BaseException as error:
            if not is_full(error):
                for id in ids:
                    blobs.publish(id)
                raise
            # The index cannot grow by the page it needs to delete a row: free the files' own space first.
            for id in ids:
                blobs.discard(id)
            store.delete_files(ids)
        for id in ids:
            blobs.discard(id)
            self.quota.remove(id)

    async def create(self, job: StoredJob) -> Batch:
        """Add a batch and start it. Errors: RecordNotFound (its input), TooManyBatches."""
        if len(self._runs) >= MAX_OPEN_BATCHES:
            raise TooManyBatches(f"the maximum of {MAX_OPEN_BATCHES} batches is open")
        await self.run_with_store(lambda store: store.add_job(job))
        self._start(job)
        return job.batch

    async def batch(self, id: str, owner: str = NO_OWNER) -> Batch:
        """Return a batch as it is now. Errors: RecordNotFound."""
        return self.current(await self.run_with_store(lambda store: store.job(id, owner)))

    def current(self, job: StoredJob) -> Batch:
        """Return a batch with the progress that has not been stored yet."""
        run = self._runs.get(job.batch.id)
        return run.batch if run is not None and job.open else job.batch

    async def cancel(self, id: str, owner: str = NO_OWNER) -> Batch:
        """Cancel a batch; no effect on one that is already ending. Errors: RecordNotFound, sqlite3.Error."""
        await self.batch(id, owner)
        run = self._runs.get(id)
        if run is not None:
            await run.end_early("cancelled")
        else:
            self._start(await self.run_with_store(lambda store: store.change(id, self._cancelled)))
        return await self.batch(id, owner)

    def _cancelled(self, job: StoredJob) -> StoredJob:
        return states.end_early(job, "cancelled", self.now())

    async def _run_housekeeping(self) -> None:
        """Start the open batches once the engine has started, then end expired files and batches periodically."""
        try:
            await self._start_all()
        except Exception:
            log.exception("cannot start the open batches")
            return
        saved, wait = self.clock.now(), TICK_SECONDS
        while True:
            await asyncio.sleep(wait)
            try:
                await self._expire()
                if self.clock.now() - saved >= SAVE_CLOCK_SECONDS:
                    saved = self.clock.now()
                    await self.run_with_store(lambda store: store.save_clock(self.clock.reading()))
                wait = TICK_SECONDS
            except (OSError, sqlite3.Error) as error:
                wait = min(max(2 * wait, RETRY_SECONDS), MAX_RETRY_SECONDS)
                log.error("cannot end expired files and batches; next attempt in %g seconds: %s", wait, error)

    async def _start_all(self) -> None:
        while not self._ready():
            await asyncio.sleep(START_POLL_SECONDS)
        budget = Budget(sample_budget(self._served.engine.info.max_running))
        gate = EngineGate(self._served.engine, until_closed=True)
        pools = (self._store_thread, self._reader_threads, self._background_threads)
        engine, background_requests = self._served.engine, self._served.background_requests
        poison_isolation = PoisonIsolation(lambda: engine.open_requests <= background_requests.requests)
        self._resources = BatchResources(
            self._served, budget, gate, *pools, paused=self._paused, poison_isolation=poison_isolation
        )
        for job in await self.run_with_store(Store.open_jobs):
            self._start(job)

    async def _expire(self) -> None:
        for run in [run for run in self._runs.values() if run.overdue]:
            await run.end_early("expired")
        if self.clock.now() >= self._no_deletion_before:
            await self.run_with_store(self._delete_expired)

    def _delete_expired(self, store: Store) -> None:
        if ids := store.expired(self.clock.now()):
            self._delete(store, ids)
            log.info("deleted expired files: %d", len(ids))

    def _start(self, job: StoredJob) -> None:
        """Start a batch that is not running. Before the engine has started, leave it to `_start_all`."""
        id = job.batch.id
        if self._resources is None or id in self._runs or not job.open:
            return
        run = self._runs[id] = BatchRun(
            job,
            self._store,
            self.data_directory,
            self._resources,
            clock=self.clock,
            quota=self.quota,
            computing_limit=self._computing_limit,
            max_line_bytes=self.limits.line,
        )
        task = asyncio.create_task(self._run_batch(id, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_batch(self, id: str, run: BatchRun) -> None:
        """Run one batch until it ends or the engine closes."""
        tries, failures, before = 0, 0, run.progress
        try:
            while True:
                try:
                    await run.run()
                    self._ended[run.batch.status] += 1
                    log.info("%s: %s", id, run.batch.status)
                    return
                except EngineClosed:
                    return  # the batch continues when the server is started again
                except Exception as error:
                    full = is_full(error)
                    if run.progress != before:
                        tries, failures, before = 0, 0, run.progress
                    tries, failures = tries + 1, failures + (not full)
                    wait = min(RETRY_SECONDS * 2 ** (tries - 1), MAX_FULL_SECONDS if full else MAX_RETRY_SECONDS)
                    expected = isinstance(error, OSError | sqlite3.Error | StoreError)
                    log.error(
                        "%s: failed, next attempt in %g seconds: %s",
                        id,
                        wait,
                        error,
                        exc_info=None if expected else error,
                    )
                    if failures >= MAX_FAILURES:
                        await self._fail_batch(id, run, error)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    return  # cancelled during the failure: CancelledError comes only once
                await run.wait(wait)
        finally:
            del self._runs[id]

    async def _fail_batch(self, id: str, run: BatchRun, error: Exception) -> None:
        """Mark a batch that fails each time as failed. The loop in `_run_batch` then cleans up."""
        message = f"The batch failed {MAX_FAILURES} times in a row without progress; the last error: {error}"
        try:
            await run.fail(BatchError(code="server_error", message=message))
        except (OSError, sqlite3.Error) as failure:
            log.error("%s: cannot mark the batch as failed: %s", id, failure)
