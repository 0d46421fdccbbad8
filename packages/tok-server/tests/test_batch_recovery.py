"""Recovery of data directories after a crash, a wrong clock, damage, or changes by others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from support.batch_services import (
    LINES,
    FakeTime,
    add_file,
    begin,
    completed,
    ended,
    made_engine,
    new_batch,
    opened,
    until,
)
from support.batching import completion_line
from tok_client.types import FileObject
from tok_core import AsyncEngine
from tok_server.batch.api import service
from tok_server.batch.api.service import DELETION_GRACE_SECONDS
from tok_server.batch.storage.answers import Answers
from tok_server.batch.storage.blobs import atomic_write
from tok_server.batch.storage.clock import Clock, ClockReading
from tok_server.batch.storage.database import DamagedError, StoreError, check_database
from tok_server.batch.storage.directory import DataDirectory
from tok_server.batch.storage.recovery import check_index, recover
from tok_server.batch.storage.store import RecordNotFound, Store, StoredJob
from tok_server.wire.json import new_id

MONTH = 31 * 86_400


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    found = made_engine(tiny_model)
    asyncio.run(found.start())
    yield found
    asyncio.run(found.close())


def filled_directory(directory: Path, files: int = 3) -> list[FileObject]:
    """Fill a data directory whose index is in the write-ahead log and not yet in the main file, as after kill -9."""
    place = DataDirectory(directory)
    store = Store(place.store)
    found = []
    for number in range(files):
        file = FileObject(id=new_id("file"), bytes=100, created_at=1, filename="f", purpose="batch")
        with place.blobs.writing(file.id) as stream:
            stream.write(bytes([number]) * 100)
        store.add_file(file)
        place.blobs.publish(file.id)
        found.append(file)
    copy = shutil.copytree(directory, directory.with_name("copy"))
    store.close()
    shutil.rmtree(directory)
    copy.rename(directory)
    return found


def content(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files except the -shm files, which SQLite recreates."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("batches.sqlite", removed),
        ("batches.sqlite", emptied),
        ("batches.sqlite-wal", removed),
        ("batches.sqlite-wal", emptied),
        ("batches.sqlite-wal", lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:])),
    ],
)
def test_empty_or_missing_index_beside_files_is_refused_without_changes(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    filled_directory(tmp_path / "data")
    damage(tmp_path / "data" / name)
    before = content(tmp_path / "data")
    with pytest.raises(StoreError, match=r"Nothing has been changed\. Restore the index"):
        check_index(DataDirectory(tmp_path / "data"))
    assert content(tmp_path / "data") == before


async def test_a_server_does_not_start_on_files_without_an_index(engine: AsyncEngine, tmp_path: Path) -> None:
    filled_directory(tmp_path / "data")
    (tmp_path / "data" / "batches.sqlite").unlink()
    before = content(tmp_path / "data")
    with pytest.raises(StoreError, match="Nothing has been changed"):
        async with opened(tmp_path / "data", engine):
            pass
    before["batches.lock"] = f"{os.getpid()}\n".encode()
    assert content(tmp_path / "data") == before


async def test_answers_without_an_index_are_refused(engine: AsyncEngine, tmp_path: Path) -> None:
    id = "batch_" + 24 * "a"
    Answers(DataDirectory(tmp_path).answers(id), id).close()
    with pytest.raises(StoreError, match="Nothing has been changed"):
        async with opened(tmp_path, engine):
            pass


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_to_the_index_loses_no_file_content(tmp_path: Path, seed: int) -> None:
    """An index that opens keeps all contents; a refused index is unchanged, and the message says so."""
    directory, chance = tmp_path / "data", random.Random(seed)
    files = filled_directory(directory, files=40)
    if seed % 2:  # the index is in the main file
        with closing(sqlite3.connect(directory / "batches.sqlite")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = directory / ("batches.sqlite" if seed % 2 else "batches.sqlite-wal")
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    hit = min(chance.choice((1, 64, 4096)), len(data) - at)
    data[at : at + hit] = chance.randbytes(hit)
    path.write_bytes(data[:at] if chance.random() < 0.2 else data)
    before = content(directory)
    place, refusal = DataDirectory(directory), ""
    try:
        check_index(place)
    except StoreError as error:
        refusal = str(error)
    if refusal:
        assert "Nothing has been changed" in refusal or "another version" in refusal
        assert content(directory) == before
        return
    store = Store(place.store)
    recover(place, store)
    store.close()
    after = content(directory)
    for number, file in enumerate(files):
        assert bytes([number]) * 100 in (after.get(f"files/{file.id}"), after.get(f"lost/{file.id}"))


def test_unreadable_record_in_the_index_is_reported_as_damage(tmp_path: Path) -> None:
    filled_directory(tmp_path / "data")
    with closing(sqlite3.connect(tmp_path / "data" / "batches.sqlite")) as connection, connection:
        connection.execute("UPDATE files SET record = x'00' WHERE number = 2")
    with pytest.raises(DamagedError, match=r"row 2 of files cannot be read.*--data-dir"):
        check_index(DataDirectory(tmp_path / "data"))


def test_recovery_deletes_unfinished_parts_and_moves_unknown_files_to_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known, half, *_ = filled_directory(tmp_path / "data", files=4)
    place = DataDirectory(tmp_path / "data")
    blobs, store = place.blobs, Store(place.store)
    blobs.withdraw(half.id)  # as if its deletion or its upload had stopped here: the row exists
    stranger, unfinished = new_id("file"), new_id("file")
    blobs.path(stranger).write_bytes(b"stranger")
    blobs.unpublished(unfinished).write_bytes(b"unfinished")
    blobs.unpublished(known.id).write_bytes(b"a second part")
    Answers(place.answers(id := "batch_" + 24 * "a"), id).close()
    for kind in ("files", "batches"):
        (tmp_path / "data" / kind / "somebody's").mkdir()
    with caplog.at_level(logging.WARNING):
        recover(place, store)
    assert {path.name for path in (tmp_path / "data" / "files").iterdir()} == {*store.file_ids(), "somebody's"}
    assert [path.name for path in (tmp_path / "data" / "batches").iterdir()] == ["somebody's"]
    assert {path.name for path in place.lost.iterdir()} == {stranger, f"{id}.sqlite"}
    assert (place.lost / stranger).read_bytes() == b"stranger"
    assert stranger in caplog.text
    assert id in caplog.text
    blobs.path(stranger).write_bytes(b"once more")
    recover(place, store)
    assert (place.lost / f"{stranger}.1").read_bytes() == b"once more"
    store.close()


def test_recovery_logs_files_whose_contents_are_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone, _ = filled_directory(tmp_path / "data", files=2)
    place = DataDirectory(tmp_path / "data")
    place.blobs.path(gone.id).unlink()
    store = Store(place.store)
    recover(place, store)
    store.close()
    assert f"the contents of 1 files are missing: {gone.id}" in caplog.text


async def stopped_in_the_middle(engine: AsyncEngine, directory: Path) -> str:
    """Stop a service while some lines of a batch are answered, and return the batch's id."""
    async with opened(directory, engine) as found:
        lines = [*LINES[:40], *(completion_line(number, max_tokens=400, ignore_eos=True) for number in range(40, 80))]
        batch = await begin(found, lines)
        await until(found, batch.id, lambda one: completed(one) >= 5)
    return batch.id


def scramble(path: Path) -> None:
    """Overwrite all pages but the first, which holds the header."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("damage", ["pages", "no database", "another batch's"])
async def test_batch_with_damaged_answers_fails_with_answers_damaged(
    engine: AsyncEngine, tmp_path: Path, damage: str, cancel: bool
) -> None:
    id = await stopped_in_the_middle(engine, tmp_path)
    path = tmp_path / "batches" / f"{id}.sqlite"
    if damage == "pages":
        scramble(path)
        with pytest.raises(DamagedError):
            check_database(path)
    elif damage == "no database":
        path.write_bytes(b"no database, but as long as one" * 1000)
    else:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE source SET name = 'another'")
    async with opened(tmp_path, engine, paused=lambda: True) as found:
        if cancel:
            await found.cancel(id)
        batch = await ended(found, id)
        assert batch.status == "failed"
        assert batch.errors
        assert [error.code for error in batch.errors.data or []] == ["answers_damaged"]
    assert (tmp_path / "lost" / f"{id}.sqlite").exists()


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b"line 70", b"line 7O"),
        lambda data: data.replace(b'"body"', b"\x00\xff\xfe!"),
        lambda data: b"",
    ],
)
async def test_batch_whose_input_has_changed_fails_with_file_unreadable(
    engine: AsyncEngine, tmp_path: Path, change: Callable[[bytes], bytes], cancel: bool
) -> None:
    id = await stopped_in_the_middle(engine, tmp_path)
    (path,) = (tmp_path / "files").iterdir()
    path.write_bytes(change(path.read_bytes()))
    async with opened(tmp_path, engine, paused=lambda: True) as found:
        if cancel:
            await found.cancel(id)
        batch = await ended(found, id)
        assert batch.status == "failed"
        assert batch.errors
        assert [(error.code, error.param) for error in batch.errors.data or []] == [
            ("file_unreadable", "input_file_id")
        ]
    assert (tmp_path / "lost" / f"{id}.sqlite").exists()


@pytest.mark.parametrize("change", [lambda data: data[: len(data) // 2], lambda data: data.replace(b'"body"', b"\xff")])
async def test_batch_fails_when_its_input_changes_while_being_read(
    engine: AsyncEngine, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    going = False
    async with opened(tmp_path, engine, paused=lambda: not going) as found:
        lines = [completion_line(number, user="x" * 3000) for number in range(1500)]  # too many to be read ahead
        batch = await begin(found, lines)
        await until(found, batch.id, lambda one: one.status == "in_progress")
        path = tmp_path / "files" / batch.input_file_id
        path.write_bytes(change(path.read_bytes()))
        going = True
        assert (await ended(found, batch.id)).status == "failed"


async def test_batch_is_given_up_after_8_failures_in_a_row(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.001)
    async with opened(tmp_path, engine) as found:
        (tmp_path / "batches").chmod(0o700)
        batches = tmp_path / "batches"
        batches.rmdir()
        batches.write_bytes(b"")  # a file in place of the directory: answers cannot be stored
        batch = await ended(found, (await begin(found, LINES)).id)
        assert batch.status == "failed"
        assert batch.errors
        (error,) = batch.errors.data or []
        assert error.code == "server_error"
        assert "8 times in a row" in error.message
        batches.unlink()
        batches.mkdir()


async def test_wall_clock_jump_expires_no_files_or_batches(engine: AsyncEngine, tmp_path: Path) -> None:
    fake = FakeTime()
    async with opened(tmp_path, engine, fake.clock(), paused=lambda: True) as found:
        fake.passed += DELETION_GRACE_SECONDS + 1
        file = await add_file(found, b"x", seconds=30 * 86_400)
        batch = await begin(found, LINES)
        fake.ahead = MONTH
        for _ in range(3):
            await found._expire()
        late = await add_file(found, b"y", seconds=3600)
        fake.ahead = -MONTH
        await found._expire()
        assert {file.id, late.id, batch.input_file_id} == await found.run_with_store(Store.file_ids)
        assert (await found.batch(batch.id)).status in ("validating", "in_progress")
        fake.ahead = 0.0
        fake.passed += 3601
        await found._expire()
        assert {file.id, batch.input_file_id} == await found.run_with_store(Store.file_ids)


async def test_start_with_a_wrong_wall_clock_deletes_nothing(engine: AsyncEngine, tmp_path: Path) -> None:
    fake = FakeTime()
    async with opened(tmp_path, engine, fake.clock()) as found:
        file = await add_file(found, b"x", seconds=3600)
    for boot in ("first boot", "second boot"):
        fake.boot, fake.ahead = boot, MONTH
        async with opened(tmp_path, engine, fake.clock()) as found:
            fake.passed += DELETION_GRACE_SECONDS + 1
            await found._expire()
            assert await found.run_with_store(Store.file_ids) == {file.id}
    fake.passed += 3600
    async with opened(tmp_path, engine, fake.clock()) as found:
        await found._expire()
        # The server has just started: an operator has time to stop it.
        assert await found.run_with_store(Store.file_ids) == {file.id}
        fake.passed += DELETION_GRACE_SECONDS + 1
        await found._expire()
        assert await found.run_with_store(Store.file_ids) == set()


def test_clock_counts_measured_time_across_restarts_and_reboots() -> None:
    fake = FakeTime()
    first = fake.clock()
    first.start(None)
    began = first.now()
    fake.passed += 10
    saved = first.reading()
    fake.passed += 20  # no process runs, but the machine does
    second = fake.clock()
    second.start(saved)
    assert second.now() - began == pytest.approx(30)
    saved = second.reading()
    fake.boot, fake.passed = "second boot", 5.0  # after an hour without power
    third = fake.clock()
    third.start(saved)
    fake.passed += 7
    assert third.now() - began == pytest.approx(37)


def test_clock_without_boot_ids_counts_each_process_alone() -> None:
    clock = Clock(lambda: 100.0, lambda: 50.0, lambda: "")
    clock.start(ClockReading(1000.0, "", 20.0))
    assert clock.now() == 1000.0


def test_store_shows_an_owner_only_its_own_and_unowned_records(tmp_path: Path) -> None:
    store = Store(tmp_path / "index")
    files = {owner: msgspec.structs.replace(TEMPLATE, id=new_id("file")) for owner in ("", "one", "other")}
    for owner, file in files.items():
        store.add_file(file, owner)
    for owner, hidden in (("one", "other"), ("other", "one")):
        assert store.file(files[owner].id, owner) == files[owner]
        listed = store.files(None, 9, newest_first=False, purpose=None, owner=owner).records
        assert listed == [files[""], files[owner]]
        for forbidden in (store.file, store.check_unused):
            with pytest.raises(RecordNotFound):
                forbidden(files[hidden].id, owner)
        with pytest.raises(RecordNotFound):
            store.files(files[hidden].id, 9, newest_first=True, purpose=None, owner=owner)
        with pytest.raises(RecordNotFound):
            store.add_job(StoredJob(batch=new_batch(files[hidden].id), owner=owner))
        store.add_job(job := StoredJob(batch=new_batch(files[owner].id), owner=owner))
        assert [one.batch.id for one in store.jobs(None, 9, owner).records] == [job.batch.id]
        with pytest.raises(RecordNotFound):
            store.job(job.batch.id, hidden)
    assert store.files(None, 9, newest_first=True, purpose=None).records == [files[""]]
    store.close()


TEMPLATE = FileObject(id="", bytes=1, created_at=1, filename="f", purpose="batch")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_data_directory_is_readable_by_its_owner_only(engine: AsyncEngine, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = tmp_path / "data"
        for kind in ("files", "batches"):
            (directory / kind).mkdir(parents=True)
        (directory / "batches.sqlite").touch()
        async with opened(directory, engine, paused=lambda: True) as found:
            batch = await begin(found, LINES)
            await until(found, batch.id, lambda one: one.status == "in_progress")
            while not list((directory / "batches").iterdir()):
                await asyncio.sleep(0.01)
            modes = {path: mode(path) for path in directory.rglob("*")}
        assert mode(directory) == 0o700
        assert {kind for path, kind in modes.items() if path.is_dir()} == {0o700}
        assert {kind for path, kind in modes.items() if path.is_file()} == {0o600}
    finally:
        os.umask(before)


def test_recovery_makes_existing_files_private(tmp_path: Path) -> None:
    (file,) = filled_directory(tmp_path / "data", files=1)
    place = DataDirectory(tmp_path / "data")
    stranger = place.blobs.path(new_id("file"))
    stranger.write_bytes(b"")
    for path in (place.blobs.path(file.id), stranger, place.store):
        path.chmod(0o644)
    store = Store(place.store)
    recover(place, store)
    assert {mode(path) for path in (place.blobs.path(file.id), place.lost / stranger.name, place.store)} == {0o600}
    store.close()


def test_directory_with_foreign_files_keeps_its_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "home"
    (directory / "somebody's").mkdir(parents=True)
    directory.chmod(0o755)
    place = DataDirectory(directory)
    assert mode(directory) == 0o755
    assert mode(directory / "files") == 0o700
    assert f"chmod 700 {directory}" in caplog.text
    place.store.touch()
    DataDirectory(directory)
    assert mode(directory) == 0o700


def test_output_of_tok_batch_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with atomic_write(tmp_path / "out") as stream:
            stream.write(json.dumps({}).encode())
        assert mode(tmp_path / "out") == 0o644
    finally:
        os.umask(before)
