"""Batches over engines that restart and end, clocks that move on, and directories as a death leaves them."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from support.batch_services import (
    LINES,
    RUNNING,
    SLOW,
    FakeTime,
    add_file,
    begin,
    begin_with,
    completed,
    ended,
    made_engine,
    opened,
    outputs,
    until,
)
from support.batching import NAME, assert_each_once, completion_line, custom_ids, jsonl, read_jsonl
from support.patience import PATIENCE, wait_until
from tok_core import AsyncEngine, EngineClosed
from tok_core.sampling_params import SamplingParams
from tok_server.batch.api import service as service_module
from tok_server.batch.api.service import GRACE_SECONDS, BatchLimits, BatchService
from tok_server.batch.execution.batch_run import BatchRun
from tok_server.batch.execution.budget import Budget
from tok_server.batch.execution.gate import Gate
from tok_server.batch.execution.run import AHEAD, BatchResources, LineSource, Run, _Ready
from tok_server.batch.storage import states
from tok_server.batch.storage.answers import Answers, LineAnswer
from tok_server.batch.storage.blobs import Blobs
from tok_server.batch.storage.store import ENDED, Missing, Store, StoredJob
from tok_server.batch.storage.validation import Validated
from tok_server.openai.endpoints import BACKGROUND_PRIORITY, ENDPOINTS, ServedModel, behind
from tok_server.settings import Formats
from tok_server.wire.errors import ApiError
from tok_server.wire.ids import new_id


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    found = made_engine(tiny_model)
    asyncio.run(found.start())
    yield found
    asyncio.run(found.close())


async def test_a_batch_whose_time_is_over_keeps_what_is_answered(engine: AsyncEngine, tmp_path: Path) -> None:
    time = FakeTime()
    async with opened(tmp_path, engine, time.clock()) as service:
        batch = await begin(service, LINES[:5] + SLOW[5:], hours=2)
        await until(service, batch.id, lambda one: completed(one) >= 5)
        time.passed += 7200
        found = await ended(service, batch.id)
        output, errors = outputs(service, found)
        assert found.status == "expired"
        assert found.expired_at == found.expires_at == int(time.wall())
        assert_each_once(LINES[:5] + SLOW[5:], output, errors)
        assert all(line["error"]["code"] == "batch_expired" for line in read_jsonl(errors))  # type: ignore[index]
        assert len(read_jsonl(output)) == completed(found) >= 5


async def test_files_whose_time_is_over_are_deleted_unless_they_are_read(engine: AsyncEngine, tmp_path: Path) -> None:
    fake = FakeTime()
    async with opened(tmp_path, engine, fake.clock(), paused=lambda: True) as service:
        batch = await begin(service, LINES)
        await add_file(service, b"", seconds=10)
        later = await add_file(service, b"", seconds=1000)
        fake.passed += 20
        assert len(await service.ask(Store.file_ids)) == 3  # the server has just started: nothing is deleted yet
        fake.passed += GRACE_SECONDS
        deadline = time.monotonic() + PATIENCE
        while len(await service.ask(lambda store: store.file_ids())) > 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        while {path.name for path in (tmp_path / "files").iterdir()} != {batch.input_file_id, later.id}:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_lines_that_were_open_when_a_replica_restarted_are_computed_anew(
    tiny_model: Path, tmp_path: Path
) -> None:
    lines = LINES[:20] + [completion_line(number, max_tokens=60, ignore_eos=True) for number in range(20, 60)]
    engine = made_engine(tiny_model)
    await engine.start()
    async with opened(tmp_path, engine) as service:
        batch = await begin(service, lines)
        await until(service, batch.id, lambda one: completed(one) >= 10)
        await engine.restart_replica(0, drain=0)
        found = await ended(service, batch.id)
        assert completed(found) == len(lines)
        assert_each_once(lines, *outputs(service, found))
    await engine.close()


async def test_a_batch_goes_on_where_an_engine_that_ended_has_left_it(
    engine: AsyncEngine, tiny_model: Path, tmp_path: Path
) -> None:
    mortal = made_engine(tiny_model)
    await mortal.start()
    async with opened(tmp_path, mortal) as service:
        batch = await begin(service, LINES + SLOW[80:])
        before = completed(await until(service, batch.id, lambda one: completed(one) >= 20))
        await mortal.close()
        assert (await service.batch(batch.id)).status == "in_progress"
    async with opened(tmp_path, engine) as service:
        kept = completed(await until(service, batch.id, lambda one: completed(one) > 0))
        assert kept >= before
        await service.cancel(batch.id)
        found = await ended(service, batch.id)
        assert completed(found) >= kept
        assert_each_once(LINES + SLOW[80:], *outputs(service, found))


async def test_no_more_is_under_way_than_the_engine_can_soon_run(engine: AsyncEngine, tmp_path: Path) -> None:
    most = 0
    async with opened(tmp_path, engine) as service:
        lines = [completion_line(number, n=1 + number % 40, max_tokens=2) for number in range(41)]
        batches = [await begin(service, lines), await begin(service, lines)]
        for batch in batches:
            while (await service.batch(batch.id)).status not in ENDED:
                most = max(most, service.under_way)
                assert service.under_way <= AHEAD * RUNNING
                await asyncio.sleep(0.002)
            assert completed(await service.batch(batch.id)) == 41
        assert service.under_way == 0
    assert most > RUNNING, "the engine was not kept busy"


async def test_whoever_waits_is_served_before_a_batch(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine) as service:
        batch = await begin(service, SLOW)
        await until(service, batch.id, lambda one: service.under_way == AHEAD * RUNNING)
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=2)).output()
        assert completed(await service.batch(batch.id)) < len(SLOW) // 2
        await service.cancel(batch.id)
        assert (await ended(service, batch.id)).status == "cancelled"


@pytest.mark.parametrize(
    ("own", "wanted"),
    [(0, BACKGROUND_PRIORITY), (5, BACKGROUND_PRIORITY + 5), (-(1 << 40), BACKGROUND_PRIORITY - (1 << 32))],
)
def test_a_line_of_any_priority_is_behind_whoever_waits(own: int, wanted: int) -> None:
    assert behind(SamplingParams(priority=own)).priority == wanted > 1 << 32


@pytest.mark.parametrize(("least", "refused"), [(0, True), (-5, False), (None, False)])
async def test_a_line_cannot_ask_for_a_class_that_is_closed_to_clients(
    engine: AsyncEngine, least: int | None, refused: bool
) -> None:
    served = ServedModel(engine, NAME, Formats(), least=least)
    with pytest.raises(ApiError, match="priority") if refused else nullcontext():
        ENDPOINTS["/v1/completions"](b'{"prompt": [1, 2], "priority": -5}', served)


async def test_while_paused_nothing_is_begun(engine: AsyncEngine, tmp_path: Path) -> None:
    paused = True
    async with opened(tmp_path, engine, paused=lambda: paused) as service:
        batch = await begin(service, LINES)
        await until(service, batch.id, lambda one: one.status == "in_progress")
        assert (completed(await service.batch(batch.id)), service.under_way) == (0, 0)
        paused = False
        assert completed(await ended(service, batch.id)) == len(LINES)


async def test_a_batch_whose_input_is_gone_fails(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine, paused=lambda: True) as service:
        batch = await begin(service, LINES)
    (tmp_path / "files" / batch.input_file_id).unlink()
    async with opened(tmp_path, engine) as service:
        found = await ended(service, batch.id)
        assert found.status == "failed"
        assert found.errors
        assert [error.code for error in found.errors.data] == ["file_unreadable"]


async def test_a_line_that_is_too_long_is_told_and_no_other(engine: AsyncEngine, tmp_path: Path) -> None:
    long = jsonl([completion_line(1, prompt="x" * 5000)])
    async with opened(tmp_path, engine) as service:
        found = await ended(service, (await begin_with(service, jsonl(LINES[:1]) + long + b"x" * (3 << 20))).id)
        assert found.status == "failed"
        assert found.errors
        assert [(error.line, error.code) for error in found.errors.data] == [(2, "line_too_long"), (3, "line_too_long")]


async def test_a_batch_nobody_made_is_missing(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine) as service:
        for ask in (service.batch, service.cancel):
            with pytest.raises(Missing):
                await ask("batch_0")


async def test_whatever_was_written_when_it_died_a_batch_ends_whole(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is copied before and after each step that lasts; every copy is a death at that moment."""
    copies = list[Path]()

    def copy_around(kind: type, name: str) -> None:
        step = getattr(kind, name)

        def copying(self: object, *arguments: object) -> object:
            copies.append(shutil.copytree(tmp_path / "data", tmp_path / f"copy {len(copies)}"))
            done = step(self, *arguments)
            copies.append(shutil.copytree(tmp_path / "data", tmp_path / f"copy {len(copies)}"))
            return done

        patch.setattr(kind, name, copying)

    lines = [completion_line(number, **({"n": 0} if number % 3 else {})) for number in range(20)]
    with monkeypatch.context() as patch:
        copy_around(Store, "change")
        copy_around(Blobs, "publish")
        async with opened(tmp_path / "data", engine) as service:
            batch = await begin(service, lines)
            await ended(service, batch.id)
    steps = 3 + 1 + 2 + 2  # changes; publishing the input, both outputs, and both once more
    assert len(copies) == 2 * steps
    for copy in copies[4:]:  # in those before there is no batch yet
        async with opened(copy, engine) as service:
            found = await ended(service, batch.id)
            assert (found.status, completed(found)) == ("completed", 7)
            output, errors = outputs(service, found)
            assert_each_once(lines, output, errors)
            assert custom_ids(read_jsonl(output)) == custom_ids(lines[::3])
            names = {batch.input_file_id, found.output_file_id, found.error_file_id}
            assert {path.name for path in (copy / "files").iterdir()} == names
        assert not list((copy / "batches").iterdir())


async def test_a_batch_goes_on_once_an_engine_that_had_failed_is_started_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = made_engine(tiny_model, max_restarts=0)
    await engine.start()
    async with opened(tmp_path, engine) as service:
        batch = await begin(service, LINES + SLOW[80:])
        await until(service, batch.id, lambda one: completed(one) >= 10)
        life = engine._core._replica_set.records[0]
        replica = life.replica
        assert replica is not None
        await asyncio.to_thread(replica.close)
        engine._core._replica_set._die(life, replica, "it was ended")
        assert engine.health().state == "failed"
        with pytest.raises(EngineClosed):  # nobody starts the engine of `tok batch` again
            await Gate(engine, until_closed=False).passed()
        before = completed(await service.batch(batch.id))
        await engine.restart_replica(0, drain=0)
        await until(service, batch.id, lambda one: completed(one) > before + AHEAD * RUNNING)
        await service.cancel(batch.id)
        assert_each_once(LINES + SLOW[80:], *outputs(service, await ended(service, batch.id)))
    await engine.close()


class Full(Answers):
    """Finds itself damaged once the budget has been taken."""

    budget: Budget
    lines: int
    full = False

    def add(self, answers: Iterable[LineAnswer]) -> list[LineAnswer]:
        wait_until(lambda: self.full or self.budget.used >= self.lines)
        self.full = True
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


async def test_a_run_whose_answers_cannot_be_kept_gives_the_whole_budget_back(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(jsonl(completion_line(number, n=0) for number in range(700)))
    budget, gate = Budget(1000), Gate(engine, until_closed=True)
    with ThreadPoolExecutor(1) as store, ThreadPoolExecutor(1) as reader:
        answers = store.submit(Full, tmp_path / "answers", "batch").result()
        answers.budget, answers.lines = budget, 700
        means = BatchResources(ServedModel(engine, NAME, Formats()), budget, gate, store, reader, reader)
        with pytest.raises(sqlite3.DatabaseError):
            await Run(LineSource(tmp_path / "in", 700), answers, means).run()
        store.submit(answers.close).result()
    assert budget.used == 0


class Cancelling:
    """Asks for something that is cancelled while it is waited for."""

    samples = 1

    async def compute(self, tenant: str = "") -> Callable[[], bytes]:
        (gone := asyncio.get_running_loop().create_future()).cancel()
        await gone
        return bytes


async def test_a_line_that_waited_for_something_cancelled_gets_an_error(engine: AsyncEngine, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(Answers, tmp_path / "answers", "batch").result()
        gate = Gate(engine, until_closed=True)
        means = BatchResources(ServedModel(engine, NAME, Formats()), Budget(1), gate, pool, pool, pool)
        run = Run(LineSource(tmp_path / "in", 1), answers, means)
        found = await run._compute(_Ready(0, "one", Cancelling()), Cancelling())
        pool.submit(answers.close).result()
    assert isinstance(found, ApiError)
    assert found.status == 503


async def test_a_service_closes_though_a_batch_fails_when_it_is_told_to_end(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def failing(life: BatchRun) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise sqlite3.OperationalError("database or disk is full") from error

    with monkeypatch.context() as patch:
        patch.setattr(BatchRun, "live", failing)
        patch.setattr(service_module, "RETRY_SECONDS", 10 * PATIENCE)  # a service that tries again does not close
        async with opened(tmp_path, engine) as service:
            await begin(service, LINES)
            await begun.wait()
            await asyncio.wait_for(service.close(), PATIENCE)
            service._clockwork = None


async def test_a_batch_begun_from_what_it_was_earlier_is_what_it_has_become(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    async with opened(tmp_path, engine, paused=lambda: True) as service:
        other = await begin(service, LINES)
        id = new_id("batch").replace("-", "_")
        job = states.validated(StoredJob(batch=msgspec.structs.replace(other, id=id)), Validated(len(LINES), "", []), 1)
        await service.ask(lambda store: store.add_job(job))
        await service.ask(lambda store: store.change(id, service._cancelled))
        service._begin(job)
        assert (await ended(service, id)).status == "cancelled"


async def test_a_smaller_limit_later_does_not_hold_for_lines_that_were_accepted(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    lines = [completion_line(0, user="x" * 2000), completion_line(1)]
    async with opened(tmp_path, engine, paused=lambda: True) as service:
        batch = await begin(service, lines)
        await until(service, batch.id, lambda one: one.status == "in_progress")
    async with opened(tmp_path, engine, line=1000) as service:
        found = await ended(service, batch.id)
        assert (found.status, completed(found)) == ("completed", 2)


async def test_a_batch_whose_input_is_gone_when_it_is_cancelled_fails(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine, paused=lambda: True) as service:
        batch = await begin(service, LINES)
        await until(service, batch.id, lambda one: one.status == "in_progress")
        (tmp_path / "files" / batch.input_file_id).unlink()
        await service.cancel(batch.id)
        assert (await ended(service, batch.id)).status == "failed"


async def test_what_nobody_waits_for_is_counted_in_prompts_as_the_engine_counts(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    served, most = ServedModel(engine, NAME, Formats()), 0
    service = BatchService(tmp_path, served, BatchLimits(file=1 << 20, line=1 << 12))
    await service.open()
    lines = [completion_line(number, n=8, prompt=[[1], [2]], max_tokens=9, ignore_eos=True) for number in range(4)]
    batch = await begin(service, lines)
    while (await service.batch(batch.id)).status not in ENDED:
        assert engine.open_requests <= served.background_requests.requests <= 4
        most = max(most, served.background_requests.requests)
        await asyncio.sleep(0)
    assert most == 4  # two prompts of 8 samples each fill the budget of twice 16 samples with two lines
    assert served.background_requests.requests == 0
    await service.close()
