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
from tok_server.batch.api.metrics import BatchFigures
from tok_server.batch.execution import BatchResources, BatchRun, Budget, Gate, PoisonIsolation, sample_budget
from tok_server.batch.storage import (
    ENDED,
    NOBODY,
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
TURNS = 8  # batches whose lines are computed at once
READERS = 2  # threads each for reading and for background work
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
TICK = 0.5  # seconds between checks for expired files and batches
STARTING = 0.05  # seconds between checks whether the engine has started
RETRY_SECONDS, MAX_RETRY_SECONDS = 10.0, 600.0  # first and longest wait after errors that may pass; doubles
MAX_FULL_SECONDS = 60.0  # longest wait for space on a full disk
MAX_FAILURES = 8  # consecutive, without progress, after which a batch fails; a full disk does not count
SAVE_CLOCK_SECONDS = 60.0
GRACE_SECONDS = 300.0  # after the start before any file is deleted: a mistaken start can be stopped in time


class TooMany(Exception):
    """The maximum number of batches is open."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Maximum bytes of a file, of a line (the body of one request), and of all files and answers together."""

    file: int
    line: int
    quota: int | None = None


class BatchService:
    """Files and batches below one directory. Call `open` within an event loop, and `close` at the end.

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
        self._directory = directory
        self._served = served
        self._ready = ready
        self._paused = paused
        self._lives: dict[str, BatchRun] = {}
        self._ended: Counter[str] = Counter()  # batches ended since the start, by status
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(TURNS)
        self._threads = ThreadPoolExecutor(1, "tok-batch-store")
        self._readers = ThreadPoolExecutor(READERS, "tok-batch-reader")
        self._clerks = ThreadPoolExecutor(READERS, "tok-batch-clerk")
        self._clockwork: asyncio.Task[None] | None = None
        self._means: BatchResources | None = None

    async def open(self) -> None:
        """Lock the directory, and complete what a crash interrupted. Errors: StoreError."""
        self.place = await self._run(lambda: DataDirectory(self._directory))
        self._lock = FileLock(self.place.lock, f"data directory {self._directory}")
        try:
            await self._run(self._open)
        except (OSError, sqlite3.Error) as error:
            self._lock.close()
            raise StoreError(f"data directory {self._directory}: cannot be used: {error}") from error
        except BaseException:
            self._lock.close()
            raise
        self._clockwork = asyncio.create_task(self._work())

    def _open(self) -> None:
        """Open the store. Runs in the store's thread, which owns its connection."""
        check_index(self.place)
        self._store = Store(self.place.store)
        try:
            self.clock.start(self._store.clock())
            self._no_deletion_before = self.clock.now() + GRACE_SECONDS
            self._store.start_deadlines(self.clock.now())
            self._store.save_clock(self.clock.reading())
            recover(self.place, self._store)
            self._measure()
        except BaseException:
            self._store.close()
            raise

    def _measure(self) -> None:
        """Count existing content against the quota, and log how many files are about to be deleted."""
        for id, path, _ in self.place.blobs.entries():
            self.quota.put(id, path.stat().st_size)
        for id in self.place.answer_ids():
            if (path := self.place.answers(id)).exists():
                self.quota.put(id, path.stat().st_size)
        if self.place.lost.is_dir():
            self.quota.put("lost", sum(path.stat().st_size for path in self.place.lost.iterdir()))
        if expired := len(self._store.expired(self.clock.now())):
            log.info("files whose time is over, to be deleted in %g seconds: %d", GRACE_SECONDS, expired)

    async def close(self) -> None:
        """Stop all batches. Computed answers are kept; open batches continue when the directory is next opened."""
        if self._clockwork is None:
            return
        tasks = [self._clockwork, *self._tasks]
        for life in self._lives.values():
            life.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._means is not None:
            self._means.gate.close()
        await self._run(self._close_store)
        for pool in (self._readers, self._clerks, self._threads):
            await asyncio.to_thread(pool.shutdown)
        self._lock.close()

    def _close_store(self) -> None:
        try:
            self._store.save_clock(self.clock.reading())
        except sqlite3.Error as error:
            log.error("the clock of the data directory cannot be saved: %s", error)
        self._store.close()

    def now(self) -> int:
        """Return the seconds since 1970, as reported to clients."""
        return int(self.clock.wall())

    @property
    def under_way(self) -> int:
        """Return the number of samples that the engine has received, or is about to receive."""
        return 0 if self._means is None else self._means.budget.used

    def figures(self) -> BatchFigures:
        """Return how many batches and lines are in which state; none are open before the engine has started."""
        batches = [life.batch for life in self._lives.values()]
        statuses = Counter(batch.status for batch in batches)
        computing = [life for life in self._lives.values() if life.batch.status == "in_progress"]
        counts = [life.batch.request_counts for life in computing if life.batch.request_counts]
        running = sum(life.under_way for life in computing)
        left = sum(one.total - one.completed - one.failed for one in counts)
        answered = Counter() if self._means is None else self._means.answered
        return BatchFigures(
            open={status: statuses[status] for status in OPEN},
            ended={status: self._ended[status] for status in sorted(ENDED)},
            lines={"waiting": max(0, left - running), "running": running},
            answered={result: answered[result] for result in ("completed", "failed")},
        )

    async def ask(self, function: Callable[[Store], T]) -> T:
        """Return the result of `function`, called with the store. Errors: those of `function`."""
        return await self._run(lambda: function(self._store))

    async def add_file(self, file: FileObject, owner: str = NOBODY, seconds: int | None = None) -> None:
        """Add a file whose content has been written. It expires after `seconds`; None: never."""
        deadline = None if seconds is None else self.clock.now() + seconds

        def add(store: Store) -> None:
            store.add_file(file, owner, deadline)
            try:
                self.place.blobs.publish(file.id)
            except BaseException:
                store.delete_files([file.id])
                raise

        await self.ask(add)

    async def delete_file(self, id: str, owner: str = NOBODY) -> None:
        """Delete a file and its content. Errors: Missing, InUse, sqlite3.Error, OSError."""

        def delete(store: Store) -> None:
            store.check_unused(id, owner)
            self._delete(store, [id])

        await self.ask(delete)

    def _delete(self, store: Store, ids: list[str]) -> None:
        """Delete these files, none of which is in use. After a crash each exists as a whole, or not at all."""
        blobs = self.place.blobs
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
        """Add a batch and start it. Errors: Missing (its input), TooMany."""
        if len(self._lives) >= MAX_OPEN_BATCHES:
            raise TooMany(f"{MAX_OPEN_BATCHES} batches have not ended, and no more may be open")
        await self.ask(lambda store: store.add_job(job))
        self._begin(job)
        return job.batch

    async def batch(self, id: str, owner: str = NOBODY) -> Batch:
        """Return a batch as it is now. Errors: Missing."""
        return self.current(await self.ask(lambda store: store.job(id, owner)))

    def current(self, job: StoredJob) -> Batch:
        """Return a batch with the progress that has not been stored yet."""
        life = self._lives.get(job.batch.id)
        return life.batch if life is not None and job.open else job.batch

    async def cancel(self, id: str, owner: str = NOBODY) -> Batch:
        """Cancel a batch; no effect on one that is already ending. Errors: Missing, sqlite3.Error."""
        await self.batch(id, owner)
        life = self._lives.get(id)
        if life is not None:
            await life.end_early("cancelled")
        else:
            self._begin(await self.ask(lambda store: store.change(id, self._cancelled)))
        return await self.batch(id, owner)

    def _cancelled(self, job: StoredJob) -> StoredJob:
        return states.end_early(job, "cancelled", self.now())

    async def _work(self) -> None:
        """Start the open batches once the engine has started, then end expired files and batches periodically."""
        try:
            await self._begin_all()
        except Exception:
            log.exception("batches cannot begin")
            return
        saved, wait = self.clock.now(), TICK
        while True:
            await asyncio.sleep(wait)
            try:
                await self._expire()
                if self.clock.now() - saved >= SAVE_CLOCK_SECONDS:
                    saved = self.clock.now()
                    await self.ask(lambda store: store.save_clock(self.clock.reading()))
                wait = TICK
            except (OSError, sqlite3.Error) as error:
                wait = min(max(2 * wait, RETRY_SECONDS), MAX_RETRY_SECONDS)
                log.error("expired files and batches cannot be ended; next try in %g seconds: %s", wait, error)

    async def _begin_all(self) -> None:
        while not self._ready():
            await asyncio.sleep(STARTING)
        budget = Budget(sample_budget(self._served.engine.info.max_running))
        gate = Gate(self._served.engine, until_closed=True)
        pools = (self._threads, self._readers, self._clerks)
        engine, background_requests = self._served.engine, self._served.background_requests
        suspects = PoisonIsolation(lambda: engine.open_requests <= background_requests.requests)
        self._means = BatchResources(self._served, budget, gate, *pools, paused=self._paused, suspects=suspects)
        for job in await self.ask(Store.open_jobs):
            self._begin(job)

    async def _expire(self) -> None:
        for life in [life for life in self._lives.values() if life.overdue]:
            await life.end_early("expired")
        if self.clock.now() >= self._no_deletion_before:
            await self.ask(self._delete_expired)

    def _delete_expired(self, store: Store) -> None:
        if ids := store.expired(self.clock.now()):
            self._delete(store, ids)
            log.info("files deleted because their time was over: %d", len(ids))

    def _begin(self, job: StoredJob) -> None:
        """Start a batch that is not running. Before the engine has started, leave it to `_begin_all`."""
        id = job.batch.id
        if self._means is None or id in self._lives or not job.open:
            return
        life = self._lives[id] = BatchRun(
            job,
            self._store,
            self.place,
            self._means,
            clock=self.clock,
            quota=self.quota,
            turns=self._turns,
            most=self.limits.line,
        )
        task = asyncio.create_task(self._live(id, life))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, id: str, life: BatchRun) -> None:
        """Run one batch until it ends or the engine closes."""
        tries, failures, before = 0, 0, life.progress
        try:
            while True:
                try:
                    await life.live()
                    self._ended[life.batch.status] += 1
                    log.info("%s: %s", id, life.batch.status)
                    return
                except EngineClosed:
                    return  # the batch continues when the server is started again
                except Exception as error:
                    full = is_full(error)
                    if life.progress != before:
                        tries, failures, before = 0, 0, life.progress
                    tries, failures = tries + 1, failures + (not full)
                    wait = min(RETRY_SECONDS * 2 ** (tries - 1), MAX_FULL_SECONDS if full else MAX_RETRY_SECONDS)
                    expected = isinstance(error, OSError | sqlite3.Error | StoreError)
                    log.error("%s: goes on in %g seconds: %s", id, wait, error, exc_info=None if expected else error)
                    if failures >= MAX_FAILURES:
                        await self._give_up(id, life, error)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    return  # cancelled during the failure: CancelledError comes only once
                await life.wait(wait)
        finally:
            del self._lives[id]

    async def _give_up(self, id: str, life: BatchRun, error: Exception) -> None:
        """Mark a batch that fails each time as failed. The loop in `_live` then cleans up."""
        message = f"The batch could not go on, {MAX_FAILURES} times in a row; the last time: {error}"
        try:
            await life.fail(BatchError(code="server_error", message=message))
        except (OSError, sqlite3.Error) as failure:
            log.error("%s: cannot be ended: %s", id, failure)

    async def _run(self, function: Callable[[], T]) -> T:
        # If cancelled, the function still runs to its end: a thread cannot be stopped halfway.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, function))
