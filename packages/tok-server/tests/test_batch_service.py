"""BatchService over restarting and closed engines, moving clocks, and directories left by a crash."""

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
from tok_server.batch.api.service import DELETION_GRACE_SECONDS, BatchLimits, BatchService
from tok_server.batch.execution.batch_run import BatchRun
from tok_server.batch.execution.budget import Budget
from tok_server.batch.execution.gate import EngineGate
from tok_server.batch.execution.line_runner import (
    SAMPLES_AHEAD_FACTOR,
    BatchResources,
    LineRunner,
    LineSource,
    _ParsedLine,
)
from tok_server.batch.storage import states
from tok_server.batch.storage.answers import Answers, LineAnswer
from tok_server.batch.storage.blobs import Blobs
from tok_server.batch.storage.store import ENDED, RecordNotFound, Store, StoredJob
from tok_server.batch.storage.validation import ValidationResult
from tok_server.openai.endpoints import BACKGROUND_PRIORITY, ENDPOINTS, ServedModel, background_params
from tok_server.settings import Formats
from tok_server.wire.errors import ApiError
from tok_server.wire.json import new_id


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    found = made_engine(tiny_model)
    asyncio.run(found.start())
    yield found
    asyncio.run(found.close())


async def test_expired_batch_keeps_answers_and_reports_unanswered_lines(engine: AsyncEngine, tmp_path: Path) -> None:
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


async def test_expired_files_are_deleted_after_the_grace_period(engine: AsyncEngine, tmp_path: Path) -> None:
    fake = FakeTime()
    async with opened(tmp_path, engine, fake.clock(), paused=lambda: True) as service:
        batch = await begin(service, LINES)
        await add_file(service, b"", seconds=10)
        later = await add_file(service, b"", seconds=1000)
        fake.passed += 20
        assert (
            len(await service.run_with_store(Store.file_ids)) == 3
        )  # the server has just started: nothing is deleted yet
        fake.passed += DELETION_GRACE_SECONDS
        deadline = time.monotonic() + PATIENCE
        while len(await service.run_with_store(lambda store: store.file_ids())) > 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        while {path.name for path in (tmp_path / "files").iterdir()} != {batch.input_file_id, later.id}:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_lines_open_at_a_replica_restart_are_computed_again(tiny_model: Path, tmp_path: Path) -> None:
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


async def test_batch_resumes_on_another_engine_without_losing_answers(
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


async def test_batch_keeps_at_most_ahead_times_max_running_samples_in_flight(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    most = 0
    async with opened(tmp_path, engine) as service:
        lines = [completion_line(number, n=1 + number % 40, max_tokens=2) for number in range(41)]
        batches = [await begin(service, lines), await begin(service, lines)]
        for batch in batches:
            while (await service.batch(batch.id)).status not in ENDED:
                most = max(most, service.in_flight)
                assert service.in_flight <= SAMPLES_AHEAD_FACTOR * RUNNING
                await asyncio.sleep(0.002)
            assert completed(await service.batch(batch.id)) == 41
        assert service.in_flight == 0
    assert most > RUNNING, "the engine was not kept busy"


async def test_interactive_requests_are_served_before_batch_lines(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine) as service:
        batch = await begin(service, SLOW)
        await until(service, batch.id, lambda one: service.in_flight == SAMPLES_AHEAD_FACTOR * RUNNING)
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=2)).output()
        assert completed(await service.batch(batch.id)) < len(SLOW) // 2
        await service.cancel(batch.id)
        assert (await ended(service, batch.id)).status == "cancelled"


@pytest.mark.parametrize(
    ("own", "wanted"),
    [(0, BACKGROUND_PRIORITY), (5, BACKGROUND_PRIORITY + 5), (-(1 << 40), BACKGROUND_PRIORITY - (1 << 32))],
)
def test_batch_line_of_any_priority_runs_in_the_background(own: int, wanted: int) -> None:
    assert background_params(SamplingParams(priority=own)).priority == wanted > 1 << 32


@pytest.mark.parametrize(("min_priority", "refused"), [(0, True), (-5, False), (None, False)])
async def test_batch_line_cannot_ask_for_a_priority_closed_to_clients(
    engine: AsyncEngine, min_priority: int | None, refused: bool
) -> None:
    served = ServedModel(engine, (NAME,), Formats(), min_priority=min_priority)
    with pytest.raises(ApiError, match="priority") if refused else nullcontext():
        ENDPOINTS["/v1/completions"](b'{"prompt": [1, 2], "priority": -5}', served)


async def test_paused_service_starts_no_lines(engine: AsyncEngine, tmp_path: Path) -> None:
    paused = True
    async with opened(tmp_path, engine, paused=lambda: paused) as service:
        batch = await begin(service, LINES)
        await until(service, batch.id, lambda one: one.status == "in_progress")
        assert (completed(await service.batch(batch.id)), service.in_flight) == (0, 0)
        paused = False
        assert completed(await ended(service, batch.id)) == len(LINES)


async def test_batch_with_missing_input_fails_with_file_unreadable(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine, paused=lambda: True) as service:
        batch = await begin(service, LINES)
    (tmp_path / "files" / batch.input_file_id).unlink()
    async with opened(tmp_path, engine) as service:
        found = await ended(service, batch.id)
        assert found.status == "failed"
        assert found.errors
        assert [error.code for error in found.errors.data] == ["file_unreadable"]


async def test_only_lines_above_the_size_limit_are_reported(engine: AsyncEngine, tmp_path: Path) -> None:
    long = jsonl([completion_line(1, prompt="x" * 5000)])
    async with opened(tmp_path, engine) as service:
        found = await ended(service, (await begin_with(service, jsonl(LINES[:1]) + long + b"x" * (3 << 20))).id)
        assert found.status == "failed"
        assert found.errors
        assert [(error.line, error.code) for error in found.errors.data] == [(2, "line_too_long"), (3, "line_too_long")]


async def test_unknown_batch_id_raises_missing(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine) as service:
        for ask in (service.batch, service.cancel):
            with pytest.raises(RecordNotFound):
                await ask("batch_0")


async def test_batch_completes_after_a_crash_at_any_durable_step(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy the directory before and after each durable step; every copy stands for a crash at that moment."""
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
    for copy in copies[4:]:  # earlier copies have no batch yet
        async with opened(copy, engine) as service:
            found = await ended(service, batch.id)
            assert (found.status, completed(found)) == ("completed", 7)
            output, errors = outputs(service, found)
            assert_each_once(lines, output, errors)
            assert custom_ids(read_jsonl(output)) == custom_ids(lines[::3])
            names = {batch.input_file_id, found.output_file_id, found.error_file_id}
            assert {path.name for path in (copy / "files").iterdir()} == names
        assert not list((copy / "batches").iterdir())


async def test_batch_resumes_once_a_failed_engine_is_restarted(tiny_model: Path, tmp_path: Path) -> None:
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
        with pytest.raises(EngineClosed):  # the engine of `tok batch` is never restarted
            await EngineGate(engine, until_closed=False).wait()
        before = completed(await service.batch(batch.id))
        await engine.restart_replica(0, drain=0)
        await until(service, batch.id, lambda one: completed(one) > before + SAMPLES_AHEAD_FACTOR * RUNNING)
        await service.cancel(batch.id)
        assert_each_once(LINES + SLOW[80:], *outputs(service, await ended(service, batch.id)))
    await engine.close()


class Full(Answers):
    """Answers that report damage once the budget has been taken."""

    budget: Budget
    lines: int
    full = False

    def add(self, answers: Iterable[LineAnswer]) -> list[LineAnswer]:
        wait_until(lambda: self.full or self.budget.used >= self.lines)
        self.full = True
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


async def test_run_that_cannot_store_answers_returns_its_whole_budget(engine: AsyncEngine, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl(completion_line(number, n=0) for number in range(700)))
    budget, gate = Budget(1000), EngineGate(engine, until_closed=True)
    with ThreadPoolExecutor(1) as store, ThreadPoolExecutor(1) as reader:
        answers = store.submit(Full, tmp_path / "answers", "batch").result()
        answers.budget, answers.lines = budget, 700
        means = BatchResources(ServedModel(engine, (NAME,), Formats()), budget, gate, store, reader, reader)
        with pytest.raises(sqlite3.DatabaseError):
            await LineRunner(LineSource(tmp_path / "in", 700), answers, means).run()
        store.submit(answers.close).result()
    assert budget.used == 0


class Cancelling:
    """A task that awaits a cancelled future."""

    samples = 1

    async def compute(self, tenant: str = "") -> Callable[[], bytes]:
        (gone := asyncio.get_running_loop().create_future()).cancel()
        await gone
        return bytes


async def test_line_that_awaits_a_cancelled_future_gets_an_error(engine: AsyncEngine, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(Answers, tmp_path / "answers", "batch").result()
        gate = EngineGate(engine, until_closed=True)
        means = BatchResources(ServedModel(engine, (NAME,), Formats()), Budget(1), gate, pool, pool, pool)
        run = LineRunner(LineSource(tmp_path / "in", 1), answers, means)
        found = await run._compute(_ParsedLine(0, "one", Cancelling()), Cancelling())
        pool.submit(answers.close).result()
    assert isinstance(found, ApiError)
    assert found.status == 503


async def test_service_closes_although_a_batch_raises_on_cancellation(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def failing(run: BatchRun) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise sqlite3.OperationalError("database or disk is full") from error

    with monkeypatch.context() as patch:
        patch.setattr(BatchRun, "run", failing)
        patch.setattr(service_module, "RETRY_SECONDS", 10 * PATIENCE)  # a service that retries would not close in time
        async with opened(tmp_path, engine) as service:
            await begin(service, LINES)
            await begun.wait()
            await asyncio.wait_for(service.close(), PATIENCE)
            service._housekeeping = None


async def test_batch_begun_from_a_stale_job_uses_the_stored_state(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine, paused=lambda: True) as service:
        other = await begin(service, LINES)
        id = new_id("batch").replace("-", "_")
        job = states.validated(
            StoredJob(batch=msgspec.structs.replace(other, id=id)), ValidationResult(len(LINES), "", []), 1
        )
        await service.run_with_store(lambda store: store.add_job(job))
        await service.run_with_store(lambda store: store.change(id, service._cancelled))
        service._start(job)
        assert (await ended(service, id)).status == "cancelled"


async def test_smaller_line_limit_does_not_apply_to_accepted_batches(engine: AsyncEngine, tmp_path: Path) -> None:
    lines = [completion_line(0, user="x" * 2000), completion_line(1)]
    async with opened(tmp_path, engine, paused=lambda: True) as service:
        batch = await begin(service, lines)
        await until(service, batch.id, lambda one: one.status == "in_progress")
    async with opened(tmp_path, engine, line=1000) as service:
        found = await ended(service, batch.id)
        assert (found.status, completed(found)) == ("completed", 2)


async def test_cancelled_batch_with_missing_input_fails(engine: AsyncEngine, tmp_path: Path) -> None:
    async with opened(tmp_path, engine, paused=lambda: True) as service:
        batch = await begin(service, LINES)
        await until(service, batch.id, lambda one: one.status == "in_progress")
        (tmp_path / "files" / batch.input_file_id).unlink()
        await service.cancel(batch.id)
        assert (await ended(service, batch.id)).status == "failed"


async def test_background_requests_are_counted_as_the_engine_counts_them(engine: AsyncEngine, tmp_path: Path) -> None:
    served, most = ServedModel(engine, (NAME,), Formats()), 0
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
