"""A full disk or an exhausted quota of the data directory: batches wait and compute nothing twice."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from support.batch_services import (
    LINES,
    add_file,
    begin,
    completed,
    ended,
    made_engine,
    opened,
    outputs,
    until,
)
from support.batching import assert_each_once, completion_line
from support.patience import PATIENCE
from tok_core import AsyncEngine
from tok_server.batch.api import service
from tok_server.batch.execution import line_runner
from tok_server.batch.storage.answers import Answers, LineAnswer
from tok_server.batch.storage.database import is_full
from tok_server.batch.storage.directory import Quota, QuotaExceeded
from tok_server.batch.storage.store import Store


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    found = made_engine(tiny_model)
    asyncio.run(found.start())
    yield found
    asyncio.run(found.close())


class Disk:
    """Limits answer databases to `pages` pages, so that SQLite itself reports a full disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pages, self.refused, add = 4, 0, Answers.add

        def limited(answers: Answers, some: Iterable[LineAnswer]) -> list[LineAnswer]:
            answers._connection.execute(f"PRAGMA max_page_count = {self.pages}")
            try:
                return add(answers, some)
            except sqlite3.OperationalError as error:
                self.refused += is_full(error)
                raise

        patch.setattr(Answers, "add", limited)


async def test_batch_on_a_full_disk_waits_and_computes_nothing_twice(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_runner, "WRITE_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(line_runner, "MAX_WRITE_RETRY_SECONDS", 0.01)
    disk, before = Disk(monkeypatch), engine.stats()["output_tokens"]
    async with opened(tmp_path, engine) as found:
        batch = await begin(found, LINES)
        deadline = time.monotonic() + PATIENCE
        while disk.refused < 20 or found.in_flight < 2 * 16:  # the batch has used its budget and retried
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert (await found.batch(batch.id)).status == "in_progress"
        disk.pages = 1 << 30
        whole = await ended(found, batch.id)
        assert (whole.status, completed(whole)) == ("completed", len(LINES))
        assert_each_once(LINES, *outputs(found, whole))
    assert engine.stats()["output_tokens"] - before == 6 * len(LINES)


async def test_a_batch_on_a_full_disk_can_be_cancelled(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.01)
    disk = Disk(monkeypatch)
    async with opened(tmp_path, engine) as found:
        batch = await begin(found, LINES)
        deadline = time.monotonic() + PATIENCE
        while not disk.refused:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await found.cancel(batch.id)
        cancelled = await ended(found, batch.id)
        assert cancelled.status == "cancelled"
        assert_each_once(LINES, *outputs(found, cancelled))


async def test_batch_waits_for_disk_space_for_its_output_file(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(service, "MAX_FULL_SECONDS", 0.01)
    fsync, room, refused, before = os.fsync, False, 0, engine.stats()["output_tokens"]

    def full(descriptor: int) -> None:
        nonlocal refused
        if not room and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part"):
            refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    async with opened(tmp_path, engine) as found:
        batch = await begin(found, LINES)
        monkeypatch.setattr(os, "fsync", full)
        deadline = time.monotonic() + PATIENCE
        while refused < 20:  # more failures than a batch survives of any other error
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert (await found.batch(batch.id)).status == "finalizing"
        assert {path.name for path in (tmp_path / "files").iterdir()} >= {batch.input_file_id}
        room = True
        whole = await ended(found, batch.id)
        assert (whole.status, completed(whole)) == ("completed", len(LINES))
        assert_each_once(LINES, *outputs(found, whole))
        assert len(list((tmp_path / "files").iterdir())) == 2
    assert engine.stats()["output_tokens"] - before == 6 * len(LINES)


async def test_batch_fails_when_its_answers_are_damaged_while_running(engine: AsyncEngine, tmp_path: Path) -> None:
    going = True
    async with opened(tmp_path, engine, paused=lambda: not going) as found:
        batch = await begin(found, [completion_line(number, max_tokens=20) for number in range(1000)])
        await until(found, batch.id, lambda one: completed(one) >= 5)
        going = False
        path = tmp_path / "batches" / f"{batch.id}.sqlite"
        for side in ("", "-wal"):
            file = path.with_name(path.name + side)
            file.write_bytes(b"\xa5" * file.stat().st_size)
        going = True
        failed = await ended(found, batch.id)
        assert failed.status == "failed"
        assert failed.errors
        assert [error.code for error in failed.errors.data or []] == ["answers_damaged"]


async def test_file_can_be_deleted_while_the_index_cannot_grow(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, engine) as found:
        file = await add_file(found, b"x")
        path, delete, tries = found.data_directory.blobs.unpublished(file.id), Store.delete_files, list[bool]()

        def full(store: Store, ids: list[str]) -> None:
            tries.append(path.exists())
            if path.exists():
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            delete(store, ids)

        monkeypatch.setattr(Store, "delete_files", full)
        await found.delete_file(file.id)
        assert tries == [True, False]
        assert not await found.run_with_store(Store.file_ids)


async def test_failed_file_deletion_keeps_the_file(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(store: Store, ids: list[str]) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with opened(tmp_path, engine) as found:
        file = await add_file(found, b"x")
        with monkeypatch.context() as patch:
            patch.setattr(Store, "delete_files", failing)
            with pytest.raises(sqlite3.OperationalError):
                await found.delete_file(file.id)
        assert found.data_directory.blobs.path(file.id).read_bytes() == b"x"


def test_quota_counts_current_sizes_and_refuses_excess() -> None:
    quota = Quota(100)
    quota.put("a", 60)
    quota.add("b", 40)
    with pytest.raises(QuotaExceeded):
        quota.add("b", 1)
    quota.put("a", 10)
    quota.add("b", 50)
    quota.remove("a")
    quota.remove("never there")
    assert quota.used == 90


async def test_batch_waits_while_its_answers_exceed_the_quota(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_runner, "WRITE_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(line_runner, "MAX_WRITE_RETRY_SECONDS", 0.01)
    async with opened(tmp_path, engine, quota=1 << 20) as found:
        filler = await add_file(found, b"x")
        # As if the file were large: the quota has space for a few answers.
        found.quota.put(filler.id, (1 << 20) - 20_000)
        batch = await begin(found, LINES)
        deadline = time.monotonic() + PATIENCE
        while found.in_flight < 2 * 16:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert (await found.batch(batch.id)).status == "in_progress"
        await found.delete_file(filler.id)
        whole = await ended(found, batch.id)
        assert completed(whole) == len(LINES)
        sizes = sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
        deadline = time.monotonic() + PATIENCE
        while found.quota.used > sizes + 1:  # `begin` does not count its input
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
