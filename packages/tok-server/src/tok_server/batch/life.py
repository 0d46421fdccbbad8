"""Life: carries one batch from its state to its end. Begun anew after a death, it does again what was not committed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from tok_client.types import Batch, FileObject
from tok_server.batch import states
from tok_server.batch.answers import Answers
from tok_server.batch.database import remove_database
from tok_server.batch.finish import Finished, finish
from tok_server.batch.lines import Stopped
from tok_server.batch.place import Place
from tok_server.batch.run import Means, Run, Source
from tok_server.batch.store import Job, Store
from tok_server.batch.validation import validate

T = TypeVar("T")


class Life:
    """One batch that has not ended.

    now    seconds since 1970
    turns  how many batches compute at once
    most   bytes of a line
    """

    def __init__(
        self,
        job: Job,
        store: Store,
        place: Place,
        means: Means,
        *,
        now: Callable[[], float],
        turns: asyncio.Semaphore,
        most: int,
    ) -> None:
        self._job = job
        self._store = store
        self._place = place
        self._means = means
        self._now = now
        self._turns = turns
        self._most = most
        self._run: Run | None = None
        self._working: asyncio.Task[None] | None = None
        self._cut = False
        self._stopped = threading.Event()

    @property
    def batch(self) -> Batch:
        """As clients see it now."""
        if self._run is None or self._job.batch.status != "in_progress":
            return self._job.batch
        return states.with_totals(self._job, self._run.totals).batch

    @property
    def under_way(self) -> int:
        """Lines that are computed now."""
        return 0 if self._run is None else self._run.under_way

    @property
    def overdue(self) -> bool:
        """Whether its time is over, and something is left to be cut short."""
        expires = self._job.batch.expires_at
        in_time = not isinstance(expires, int) or self._now() < expires
        return not in_time and self._job.batch.status in states.BEFORE_THE_END

    async def end_early(self, how: states.Early) -> None:
        """Cuts short what is done for it; `live` then finishes it. Without effect where it finishes already."""
        before = self._job.batch.status
        await self._change(partial(states.end_early, how=how, now=int(self._now())))
        if before in states.BEFORE_THE_END and self._working is not None:
            self._cut = True
            self._stopped.set()
            self._working.cancel()

    def stop(self) -> None:
        """Makes threads that work for it end soon. To be called before `live` is cancelled."""
        self._stopped.set()

    async def live(self) -> None:
        """Returns when the batch has ended. May be called again after errors: EngineClosed, OSError, sqlite3.Error."""
        # It may have been changed between being read and being here.
        self._job = await self._in(self._means.store, partial(self._store.job, self._job.batch.id))
        if self._job.batch.status == "validating":
            await self._interruptible(self._validate())
        if self._job.batch.status == "in_progress":
            await self._interruptible(self._answer())
        if self._job.open:
            await self._finish()
        await self._in(self._means.store, partial(remove_database, self._place.answers(self._job.batch.id)))

    async def _interruptible(self, work: Coroutine[object, object, None]) -> None:
        """Returns when it is done, or has been cut short by `end_early`."""
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
        try:
            found = await self._in(self._means.clerk, look)
        except FileNotFoundError:
            await self._lose_input()
        else:
            await self._change(partial(states.validated, found=found, now=int(self._now())))

    async def _answer(self) -> None:
        async with self._turns:
            answers = await self._in(self._means.store, self._open_answers)
            try:
                self._run = Run(self._source, answers, self._means)
                await self._run.run()
            except FileNotFoundError:
                await self._lose_input()
            finally:
                await self._in(self._means.store, answers.close)
        await self._change(partial(states.answered, now=int(self._now())))

    async def _lose_input(self) -> None:
        message = f"The content of file {self._job.batch.input_file_id!r} is gone."
        await self._change(partial(states.unreadable, message=message, now=int(self._now())))

    async def _finish(self) -> None:
        self._stopped.clear()
        now = int(self._now())
        write = partial(finish, self._job, self._place, self._source, now, self._stopped.is_set)
        try:
            found = await self._in(self._means.clerk, write)
        except FileNotFoundError:
            if self._source.path.exists():
                raise
            await self._lose_input()
        else:
            await self._end(found)

    async def _end(self, found: Finished) -> None:
        ids = [None if file is None else file.id for file in (found.output, found.errors)]
        change = partial(states.finished, totals=found.totals, output=ids[0], errors=ids[1], now=int(self._now()))
        await self._change(change, found.files)

    @property
    def _source(self) -> Source:
        return Source(self._place.blobs.path(self._job.batch.input_file_id), self._job.lines)

    def _open_answers(self) -> Answers:
        return Answers(self._place.answers(self._job.batch.id), self._job.batch.id)

    async def _change(self, change: Callable[[Job], Job], outputs: Sequence[FileObject] = ()) -> None:
        id = self._job.batch.id
        self._job = await self._in(self._means.store, lambda: self._store.change(id, change, outputs))

    async def _in(self, executor: Executor, function: Callable[[], T]) -> T:
        # Cancelled, it ends by itself: a thread cannot be stopped halfway.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(executor, function))
