"""Finish a batch: write its answers to the output file and the error file. Runs in a thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, NamedTuple

from tok_client.types import UNSET, FileObject
from tok_server.batch.execution.outcome import each_line
from tok_server.batch.execution.run import LineSource
from tok_server.batch.storage import Answers, DataDirectory, StoredJob, Totals, states
from tok_server.wire import new_id

OUTPUT = "batch_output"


class FinishedBatch(NamedTuple):
    """The output and error files, None if empty, and the totals of their lines."""

    output: FileObject | None
    errors: FileObject | None
    totals: Totals

    @property
    def files(self) -> list[FileObject]:
        """Return the files that are not empty."""
        return [file for file in (self.output, self.errors) if file is not None]


def finish(
    job: StoredJob, place: DataDirectory, source: LineSource, now: int, stopped: Callable[[], bool]
) -> FinishedBatch:
    """Write both files, which the caller publishes. A repeated call writes new files with other ids.

    Errors: Stopped, InputChanged, OSError, sqlite3.Error, StoreError.
    """
    if not job.lines:
        return FinishedBatch(None, None, Totals())
    output, errors = new_id("file"), new_id("file")
    try:
        totals = _write(job, place, source, output, errors, stopped)
        return FinishedBatch(_kept(job, place, output, "output", now), _kept(job, place, errors, "error", now), totals)
    except BaseException:
        place.blobs.discard(output)
        place.blobs.discard(errors)
        raise


def _write(
    job: StoredJob, place: DataDirectory, source: LineSource, output: str, errors: str, stopped: Callable[[], bool]
) -> Totals:
    with ExitStack() as opened:
        answers = opened.enter_context(Answers(place.answers(job.batch.id), job.batch.id))
        streams: list[IO[bytes]] = [opened.enter_context(place.blobs.writing(one)) for one in (output, errors)]

        def take(text: bytes, failed: bool) -> None:
            streams[failed].write(text + b"\n")

        left = each_line(source, answers, states.missing(job), take, stopped)
        totals = answers.totals()
    return totals._replace(failed=totals.failed + left)


def _kept(job: StoredJob, place: DataDirectory, id: str, what: str, now: int) -> FileObject | None:
    size = place.blobs.unpublished(id).stat().st_size
    if not size:
        place.blobs.discard(id)
        return None
    return FileObject(
        id=id,
        bytes=size,
        created_at=now,
        expires_at=UNSET if job.keep_seconds is None else now + job.keep_seconds,
        filename=f"{job.batch.id}_{what}.jsonl",
        purpose=OUTPUT,
    )
