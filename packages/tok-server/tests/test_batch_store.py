"""The store of files and batches against a model, stored answers, file locks and durable files."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tok_client.types import UNSET, Batch, BatchError, FileObject
from tok_server.batch.storage import states
from tok_server.batch.storage.answers import Answers, LineAnswer, Totals
from tok_server.batch.storage.blobs import Blobs, atomic_write
from tok_server.batch.storage.database import StoreError
from tok_server.batch.storage.directory import DataDirectory, FileLock
from tok_server.batch.storage.store import FileInUse, RecordNotFound, Store, StoredJob
from tok_server.batch.storage.validation import ValidationResult

GONE = "file-" + 24 * "0"


def made_file(id: str, purpose: str, expires: int | None) -> FileObject:
    return FileObject(
        id=id,
        bytes=1,
        created_at=1,
        filename="é",
        purpose=purpose,
        expires_at=UNSET if expires is None else expires,
    )


def made_job(id: str, input: str) -> StoredJob:
    batch = Batch(
        id=id,
        endpoint="/v1/completions",
        input_file_id=input,
        completion_window="24h",
        status="validating",
        created_at=1,
    )
    return StoredJob(batch=batch)


class StoreMachine(RuleBasedStateMachine):
    """Compares the store with dictionaries, however often the store is closed and opened."""

    files = Bundle("files")
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.path = Path(self.directory.name) / "store.sqlite"
        self.store = Store(self.path)
        self.known_files: dict[str, FileObject] = {}
        self.known_jobs: dict[str, StoredJob] = {}
        self.count = 0

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()

    def new_id(self, kind: str) -> str:
        self.count += 1
        return f"{kind}-{self.count:024x}"

    def readers(self, id: str) -> list[str]:
        return [one.batch.id for one in self.known_jobs.values() if one.open and one.batch.input_file_id == id]

    @rule(target=files, purpose=st.sampled_from(["batch", "batch_output"]), expires=st.none() | st.integers(0, 100))
    def add_file(self, purpose: str, expires: int | None) -> str:
        file = made_file(self.new_id("file"), purpose, expires)
        self.store.add_file(file, deadline=expires)
        self.known_files[file.id] = file
        return file.id

    @rule(target=jobs, input=files)
    def add_job(self, input: str) -> str:
        job = made_job(self.new_id("batch"), input)
        if input in self.known_files and self.known_files[input].purpose == "batch":
            self.store.add_job(job)
            self.known_jobs[job.batch.id] = job
        else:
            with pytest.raises(RecordNotFound):
                self.store.add_job(job)
        return job.batch.id

    @rule(id=jobs, step=st.sampled_from(["validated", "refused", "answered", "cancelled", "expired", "finished"]))
    def change(self, id: str, step: str) -> None:
        def change(job: StoredJob) -> StoredJob:
            match step:
                case "validated":
                    return states.validated(job, ValidationResult(3, "", []), 2)
                case "refused":
                    return states.failed(job, BatchError(code="file_unreadable", message="gone"), 2)
                case "answered":
                    return states.answered(job, 3)
                case "finished":
                    return states.finished(job, Totals(2, 1), None, None, 4)
                case _:
                    return states.end_early(job, "cancelled" if step == "cancelled" else "expired", 3)

        if id not in self.known_jobs:
            with pytest.raises(RecordNotFound):
                self.store.change(id, change)
            return
        job = self.known_jobs[id] = change(self.known_jobs[id])
        outputs = []
        if step == "finished" and not job.open:
            outputs = [made_file(self.new_id("file"), "batch_output", None)]
            self.known_files |= {file.id: file for file in outputs}
        assert self.store.change(id, change, outputs) == job

    @rule(id=files)
    def delete_file(self, id: str) -> None:
        if id not in self.known_files:
            with pytest.raises(RecordNotFound):
                self.store.check_unused(id)
        elif self.readers(id):
            with pytest.raises(FileInUse):
                self.store.check_unused(id)
        else:
            self.store.check_unused(id)
            self.store.delete_files([id])
            del self.known_files[id]

    @rule(now=st.integers(0, 100))
    def expire(self, now: int) -> None:
        over = {
            file.id
            for file in self.known_files.values()
            if isinstance(file.expires_at, int) and file.expires_at <= now and not self.readers(file.id)
        }
        assert set(self.store.expired(now)) == over
        self.store.delete_files(over)
        for id in over:
            del self.known_files[id]

    @rule(limit=st.integers(1, 3), newest_first=st.booleans(), purpose=st.sampled_from([None, "batch"]))
    def list_files(self, limit: int, newest_first: bool, purpose: str | None) -> None:
        found: list[FileObject] = []
        more = True
        while more:
            after = found[-1].id if found else None
            page, more = self.store.files(after, limit, newest_first=newest_first, purpose=purpose)
            assert len(page) == limit or not more
            found += page
        wanted = [file for file in self.known_files.values() if purpose in (None, file.purpose)]
        assert found == (wanted[::-1] if newest_first else wanted)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.path)

    @invariant()
    def everything_is_there(self) -> None:
        assert self.store.file_ids() == self.known_files.keys()
        assert self.store.open_jobs() == [job for job in self.known_jobs.values() if job.open]
        listed, more = self.store.jobs(None, 1000)
        assert (listed, more) == (list(self.known_jobs.values())[::-1], False)


StoreMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=20)
TestStore = StoreMachine.TestCase


@given(st.lists(st.sampled_from(["validated", "answered", "cancelled", "expired", "finished"]), max_size=8))
def test_a_batch_that_has_ended_never_changes_again(steps: list[str]) -> None:
    job, ended = made_job("batch-1", GONE), None
    for step in steps:
        match step:
            case "validated":
                job = states.validated(job, ValidationResult(1, "", []), 1)
            case "answered":
                job = states.answered(job, 1)
            case "finished":
                job = states.finished(job, Totals(1), None, None, 1)
            case _:
                job = states.end_early(job, "cancelled" if step == "cancelled" else "expired", 1)
        assert ended in (None, job)
        ended = None if job.open else job


def made_answer(line: int, text: bytes = b"x", failed: bool = False) -> LineAnswer:
    return LineAnswer(line, failed, 1, 2, 3, 4, text)


def test_answers_keep_the_first_answer_of_each_line(tmp_path: Path) -> None:
    with Answers(tmp_path / "a", "batch") as answers:
        assert answers.add([made_answer(2, b"first")]) == [made_answer(2, b"first")]
        assert answers.add([made_answer(2, b"second"), made_answer(0, failed=True)]) == [made_answer(0, failed=True)]
    with Answers(tmp_path / "a", "batch") as answers:
        assert list(answers.in_order()) == [made_answer(0, failed=True), made_answer(2, b"first")]
        assert bytes(answers.answered(4)) == b"\x01\x00\x01\x00"
        assert answers.totals() == Totals(1, 1, 2, 4, 6, 8)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans())))
def test_totals_equal_the_sum_of_added_answers(rows: list[tuple[int, bool]]) -> None:
    with TemporaryDirectory() as directory, Answers(Path(directory) / "a", "batch") as answers:
        totals = Totals()
        for line, failed in rows:
            totals = totals.plus(answers.add([made_answer(line, failed=failed)]))
        assert totals == answers.totals()


def test_answers_to_another_batch_are_refused(tmp_path: Path) -> None:
    Answers(tmp_path / "a", "one").close()
    with pytest.raises(StoreError, match="another batch"):
        Answers(tmp_path / "a", "two")


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\x00" + bytes(100)])
def test_store_refuses_a_file_that_is_not_a_database(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "broken").write_bytes(content)
    with pytest.raises(StoreError, match="broken"):
        Store(path)


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "newer")
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(StoreError, match="another version of tok"):
        Store(tmp_path / "newer")


def test_file_lock_is_refused_until_released(tmp_path: Path) -> None:
    held = FileLock(tmp_path / "lock", "the directory")
    with pytest.raises(StoreError, match=f"the directory is in use by another tok process \\({os.getpid()}\\)"):
        FileLock(tmp_path / "lock", "the directory")
    held.close()
    FileLock(tmp_path / "lock", "the directory").close()


def test_file_lock_deleted_by_its_holder_can_be_acquired_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends after another process opens the file and before that process locks it."""
    path, flock = tmp_path / "lock", fcntl.flock
    held = [FileLock(path, "it")]

    def late(descriptor: int, how: int) -> None:
        if held:
            path.unlink()
            held.pop().close()
        flock(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        second = FileLock(path, "it")
    with pytest.raises(StoreError, match="in use"):
        FileLock(path, "it")
    second.close()


def test_durable_file_is_replaced_atomically(tmp_path: Path) -> None:
    (path := tmp_path / "f").write_bytes(b"old")
    with pytest.raises(TypeError), atomic_write(path) as stream:
        stream.write(b"new" if stream.tell() else "text")  # type: ignore[arg-type]
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("f", b"old")]
    with atomic_write(path) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("f", b"new")]


@pytest.mark.parametrize("id", ["", "file-", "../x", "file-" + 24 * "g", GONE + "/..", GONE + "\n", "file-" + 25 * "0"])
def test_invalid_ids_never_become_paths(tmp_path: Path, id: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Blobs(tmp_path).path(id)
    with pytest.raises(ValueError, match="allowed"):
        DataDirectory(tmp_path).answers(id)


def test_data_directory_that_cannot_be_created_raises_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be created"):
        DataDirectory(tmp_path / "file" / "data")
