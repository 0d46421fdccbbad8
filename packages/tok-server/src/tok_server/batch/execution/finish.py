"""Finish a batch: write its answers to the output file and the error file. Runs in a thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, NamedTuple

from tok_client.types import UNSET, FileObject
from tok_server.batch.execution.all_lines import for_each_line
from tok_server.batch.execution.line_runner import LineSource
from tok_server.batch.storage import Answers, DataDirectory, StoredJob, Totals, states
from tok_server.wire import new_id

OUTPUT_PURPOSE = "batch_output"


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
    job: StoredJob, data_directory: DataDirectory, source: LineSource, now: int, stopped: Callable[[], bool]
) -> FinishedBatch:
    """Write both files, which the caller publishes. A repeated call writes new files with other ids.

    Errors: Stopped, InputChanged, OSError, sqlite3.Error, StoreError.
    """
    if not job.lines:
        return FinishedBatch(None, None, Totals())
    output, errors = new_id("file"), new_id("file")
    try:
        totals = _write(job, data_directory, source, output, errors, stopped)
        return FinishedBatch(
            _file_object(job, data_directory, output, "output", now),
            _file_object(job, data_directory, errors, "error", now),
            totals,
        )
    except BaseException:
        data_directory.blobs.discard(output)
        data_directory.blobs.discard(errors)
        raise


def _write(
    job: StoredJob,
    data_directory: DataDirectory,
    source: LineSource,
    output: str,
    errors: str,
    stopped: Callable[[], bool],
) -> Totals:
    with ExitStack() as opened:
        answers = opened.enter_context(Answers(data_directory.answers(job.batch.id), job.batch.id))
        streams: list[IO[bytes]] = [opened.enter_context(data_directory.blobs.writing(one)) for one in (output, errors)]

        def write_line(text: bytes, failed: bool) -> None:
            streams[failed].write(text + b"\n")

        unanswered = for_each_line(source, answers, states.unanswered_reason(job), write_line, stopped)
        totals = answers.totals()
    return totals._replace(failed=totals.failed + unanswered)


def _file_object(job: StoredJob, data_directory: DataDirectory, id: str, kind: str, now: int) -> FileObject | None:
    size = data_directory.blobs.unpublished(id).stat().st_size
    if not size:
        data_directory.blobs.discard(id)
        return None
    return FileObject(
        id=id,
        bytes=size,
        created_at=now,
        expires_at=UNSET if job.keep_seconds is None else now + job.keep_seconds,
        filename=f"{job.batch.id}_{kind}.jsonl",
        purpose=OUTPUT_PURPOSE,
    )
