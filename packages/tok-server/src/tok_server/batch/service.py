"""BatchService: the batches of a server, all of them alive at once, and the files they read and write."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tok_client.types import Batch
from tok_core import EngineClosed
from tok_server.batch import states
from tok_server.batch.budget import Budget
from tok_server.batch.gate import Gate
from tok_server.batch.life import Life
from tok_server.batch.lock import FileLock
from tok_server.batch.metrics import BatchFigures
from tok_server.batch.place import Place
from tok_server.batch.run import Means, samples_ahead
from tok_server.batch.store import ENDED, Job, Store
from tok_server.endpoints import Served

log = logging.getLogger("tok.server")

T = TypeVar("T")

MOST_OPEN = 1000  # batches that have not ended
TURNS = 8  # batches that compute at once
READERS = 2
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
TICK = 0.5  # seconds between two looks at the clock
STARTING = 0.05  # seconds between two looks whether there is an engine
RETRY_SECONDS = 10.0  # after an error that may pass, such as a full disk


class TooMany(Exception):
    """No more batches may be open."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Most bytes of a file, and of a line: of the body of one request."""

    file: int
    line: int


class BatchService:
    """Files and batches below one directory: `open` it within an event loop, and `close` it.

    ready   whether the engine has started
    paused  whether no more lines shall begin
    now     seconds since 1970
    """

    def __init__(
        self,
        directory: Path,
        served: Served,
        limits: Limits,
        *,
        ready: Callable[[], bool] = lambda: True,
        paused: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self.now = now
        self._directory = directory
        self._served = served
        self._ready = ready
        self._paused = paused
        self._lives: dict[str, Life] = {}
        self._ended: Counter[str] = Counter()  # lives, by status
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(TURNS)
        self._threads = ThreadPoolExecutor(1, "tok-batch-store")
        self._readers = ThreadPoolExecutor(READERS, "tok-batch-reader")
        self._clerks = ThreadPoolExecutor(READERS, "tok-batch-clerk")
        self._clockwork: asyncio.Task[None] | None = None
        self._means: Means | None = None

    async def open(self) -> None:
        """Takes the directory, and removes what a death has left there. Errors: StoreError."""
        self.place = await self._run(lambda: Place(self._directory))
        self._lock = FileLock(self.place.lock, f"data directory {self._directory}")
        try:
            self._store = await self._run(lambda: Store(self.place.store))
        except BaseException:
            self._lock.close()
            raise
        await self._run(self._sweep)
        self._clockwork = asyncio.create_task(self._work())

    def _sweep(self) -> None:
        self.place.sweep(self._store.file_ids(), {job.batch.id for job in self._store.open_jobs()})

    async def close(self) -> None:
        """Stops; what is computed is kept, what is open goes on when the directory is next opened."""
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
        await self._run(self._store.close)
        for pool in (self._readers, self._clerks, self._threads):
            await asyncio.to_thread(pool.shutdown)
        self._lock.close()

    @property
    def under_way(self) -> int:
        """Samples that the engine has got, or is about to get."""
        return 0 if self._means is None else self._means.budget.used

    def figures(self) -> BatchFigures:
        """How many batches and lines there are in which state; none are open while the engine starts."""
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
        """What `function` returns of the store. Errors: its own."""
        return await self._run(lambda: function(self._store))

    async def create(self, job: Job) -> Batch:
        """A new batch. Errors: Missing (its input), TooMany."""
        if len(self._lives) >= MOST_OPEN:
            raise TooMany(f"{MOST_OPEN} batches have not ended, and no more may be open")
        await self.ask(lambda store: store.add_job(job))
        self._begin(job)
        return job.batch

    async def batch(self, id: str) -> Batch:
        """One batch as it is now. Errors: Missing."""
        return self.current(await self.ask(lambda store: store.job(id)))

    def current(self, job: Job) -> Batch:
        """A batch with the progress that has not been written down."""
        life = self._lives.get(job.batch.id)
        return life.batch if life is not None and job.open else job.batch

    async def cancel(self, id: str) -> Batch:
        """Ends a batch; without effect on one that ends already. Errors: Missing."""
        life = self._lives.get(id)
        if life is not None:
            await life.end_early("cancelled")
        else:
            self._begin(await self.ask(lambda store: store.change(id, self._cancelled)))
        return await self.batch(id)

    def _cancelled(self, job: Job) -> Job:
        return states.end_early(job, "cancelled", int(self.now()))

    async def _work(self) -> None:
        """Begins what is open once there is an engine, then looks at the clock from time to time."""
        try:
            await self._begin_all()
        except Exception:
            log.exception("batches cannot begin")
            return
        while True:
            await asyncio.sleep(TICK)
            try:
                await self._expire()
            except (OSError, sqlite3.Error) as error:
                log.error("expired files and batches cannot be ended: %s", error)

    async def _begin_all(self) -> None:
        while not self._ready():
            await asyncio.sleep(STARTING)
        budget = Budget(samples_ahead(self._served.engine.info.max_running))
        gate = Gate(self._served.engine, until_closed=True)
        pools = (self._threads, self._readers, self._clerks)
        self._means = Means(self._served, budget, gate, *pools, paused=self._paused)
        for job in await self.ask(Store.open_jobs):
            self._begin(job)

    async def _expire(self) -> None:
        for life in [life for life in self._lives.values() if life.overdue]:
            await life.end_early("expired")
        for id in await self.ask(partial(Store.delete_expired, now=self.now())):
            await self._run(partial(self.place.blobs.delete, id))

    def _begin(self, job: Job) -> None:
        """Brings a batch to life, unless it is, or there is no engine yet: then that will."""
        id = job.batch.id
        if self._means is None or id in self._lives or not job.open:
            return
        life = self._lives[id] = Life(
            job, self._store, self.place, self._means, now=self.now, turns=self._turns, most=self.limits.line
        )
        task = asyncio.create_task(self._live(id, life))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, id: str, life: Life) -> None:
        """One batch to its end, or to that of the engine."""
        try:
            while True:
                try:
                    await life.live()
                    self._ended[life.batch.status] += 1
                    log.info("%s: %s", id, life.batch.status)
                    return
                except EngineClosed:
                    return  # it goes on when the server is started again
                except (OSError, sqlite3.Error) as error:
                    log.error("%s: goes on in %g seconds: %s", id, RETRY_SECONDS, error)
                except Exception:
                    log.exception("%s: goes on in %g seconds", id, RETRY_SECONDS)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    return  # told to end while it failed: that is told only once
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._lives[id]

    async def _run(self, function: Callable[[], T]) -> T:
        # Cancelled, it is carried out all the same: a thread cannot be stopped halfway.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, function))
