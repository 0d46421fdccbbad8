"""Batch lines that kill the engine, or are slow to check or to serialize, do not harm other lines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.batch_services import LINES, begin, completed, ended, made_engine, opened, outputs
from support.batching import completion_line, custom_ids, read_jsonl
from support.patience import PATIENCE, until
from support.tiny_models import change_weights, make_model
from tok_core import AsyncEngine, EngineDead, RequestOutput, SamplingParams
from tok_core.sampling_params import Grammar
from tok_server.batch.execution.poison_isolation import PoisonIsolation, PoisonRequest
from tok_server.batch.execution.shielding import uninterrupted
from tok_server.openai.endpoints import BACKGROUND_PRIORITY, MAX_BACKGROUND_GRAMMARS, GenerationTask


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    found = made_engine(tiny_model)
    asyncio.run(found.start())
    yield found
    asyncio.run(found.close())


async def test_uninterrupted_waits_for_its_thread_despite_cancellation() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        done.append(1)

    task = asyncio.create_task(uninterrupted(asyncio.to_thread(work)))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


def end(engine: AsyncEngine) -> None:
    """Kill the replica as the death of its worker would."""
    life = engine._core._replica_set.records[0]
    replica = life.replica
    assert replica is not None
    replica.close()
    engine._core._replica_set._die(life, replica, "its worker has ended")


async def test_only_the_line_that_kills_the_engine_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made_engine(tiny_model)
    computed, guilty, deaths = GenerationTask._outputs, [77, 77], list[int]()

    async def killing(self: GenerationTask, tenant: str) -> list[RequestOutput]:
        if self._job.prompts[0] != guilty:
            return await computed(self, tenant)
        open_too = asyncio.create_task(computed(self, tenant))
        await asyncio.sleep(0.01)  # other lines are submitted meanwhile
        deaths.append(engine.open_requests)
        await asyncio.to_thread(end, engine)
        return await open_too

    monkeypatch.setattr(GenerationTask, "_outputs", killing)
    await engine.start()
    lines = [completion_line(number, max_tokens=60, ignore_eos=True) for number in range(40)]
    lines[20] = completion_line(20, prompt=guilty, max_tokens=60, ignore_eos=True)
    async with opened(tmp_path, engine) as service:
        batches = [await begin(service, lines), await begin(service, LINES)]
        found = [await ended(service, batch.id) for batch in batches]
        assert engine.health().ok
        assert [completed(one) for one in found] == [39, 80]
        errors = read_jsonl(outputs(service, found[0])[1])
    await engine.close()
    assert custom_ids(errors) == ["line 20"]
    response = errors[0]["response"]
    assert isinstance(response, dict)
    assert (response["status_code"], response["body"]["error"]["code"]) == (500, "engine_died")
    assert deaths[0] > deaths[1] >= deaths[2] == 1  # by the second attempt, all other lines may be answered
    assert len(deaths) == 3


async def test_only_the_line_with_non_finite_logits_fails(tmp_path: Path) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["model.embed_tokens.weight"][300] = torch.nan

    engine = made_engine(change_weights(make_model("llama-untied", tmp_path / "model"), spoil))
    await engine.start()
    lines = [completion_line(number, logit_bias={"300": -100}) for number in range(10)]
    lines[4] = completion_line(4, prompt=[3, 300, 5])
    async with opened(tmp_path / "data", engine) as service:
        batch = await ended(service, (await begin(service, lines)).id)
        errors = read_jsonl(outputs(service, batch)[1])
    await engine.close()
    assert (batch.status, completed(batch), custom_ids(errors)) == ("completed", 9, ["line 4"])
    response = errors[0]["response"]
    assert isinstance(response, dict)
    assert response["status_code"] == 500
    error = response["body"]["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_failed")
    assert error["message"].startswith("the model's logits are not finite")


async def test_poison_request_of_a_client_does_not_fail_batch_lines(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tok_server.batch.execution.poison_isolation.RETRY_PAUSE_SECONDS", 0.0)
    engine, computed, deaths = made_engine(tiny_model, max_restarts=10), GenerationTask._outputs, list[int]()

    async def beside_a_guilty_one(self: GenerationTask, tenant: str) -> list[RequestOutput]:
        """Submit the client's poison request five times, each time as soon as line 3 is open."""
        if self._job.prompts[0] != [77, 77] or len(deaths) == 5:
            return await computed(self, tenant)
        open_too = asyncio.create_task(computed(self, tenant))
        await asyncio.sleep(0)
        guilty = engine.generate([78, 78], SamplingParams(max_tokens=900, ignore_eos=True))
        await until_open(engine, 2)
        deaths.append(engine.open_requests)
        await asyncio.to_thread(end, engine)
        with pytest.raises(EngineDead):
            await guilty.output()
        return await open_too

    monkeypatch.setattr(GenerationTask, "_outputs", beside_a_guilty_one)
    await engine.start()
    lines = [completion_line(number, max_tokens=60, ignore_eos=True) for number in range(8)]
    lines[3] = completion_line(3, prompt=[77, 77], max_tokens=900, ignore_eos=True)
    async with opened(tmp_path, engine) as service:
        found = await ended(service, (await begin(service, lines)).id)
        assert completed(found) == 8
    await engine.close()
    assert len(deaths) == 5


async def until_open(engine: AsyncEngine, requests: int) -> None:
    await until(lambda: engine.open_requests >= requests)


async def test_isolation_waits_for_quiet_and_counts_only_deaths_while_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tok_server.batch.execution.poison_isolation.CHECK_SECONDS", 0.0)
    monkeypatch.setattr("tok_server.batch.execution.poison_isolation.QUIET_WAIT_SECONDS", 60.0)
    looks, tries = 0, list[int]()

    def quiet() -> bool:
        nonlocal looks
        looks += 1
        return looks % 3 == 0

    async def once() -> str:
        tries.append(looks)
        if len(tries) <= 2:
            raise EngineDead("it was open", BACKGROUND_PRIORITY)
        if len(tries) <= 6:
            raise EngineDead("the engine is restarting")
        if len(tries) == 7:
            raise EngineDead("it was open", BACKGROUND_PRIORITY)
        raise AssertionError("it was computed once more")

    with pytest.raises(PoisonRequest):
        await PoisonIsolation(quiet).compute(once)
    assert tries == [0, 0, 3, 6, 9, 12, 15]


async def test_suspect_lines_run_in_groups_then_alone_before_other_lines() -> None:
    poison_isolation, first, guilty = PoisonIsolation(), asyncio.Event(), {3, 50}
    running, most, tries = set[int](), [0] * 4, [0] * 100

    async def once(line: int) -> int:
        tries[line] += 1
        if tries[line] == 1:
            await first.wait()
            raise EngineDead("all of them were open", BACKGROUND_PRIORITY)
        running.add(line)
        most[tries[line]] = max(most[tries[line]], len(running))
        await asyncio.sleep(0)
        beside = running & guilty
        await asyncio.sleep(0)
        running.discard(line)
        if beside:
            raise EngineDead("those beside it were open", BACKGROUND_PRIORITY)
        return line

    async def other() -> int:
        assert not running
        return -1

    tasks = [asyncio.create_task(poison_isolation.compute(partial(once, line))) for line in range(100)]
    await asyncio.sleep(0)
    first.set()
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(poison_isolation.compute(other)))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert {line for line, one in enumerate(found) if isinstance(one, PoisonRequest)} == guilty
    assert [one for one in found if not isinstance(one, PoisonRequest)] == [*sorted(set(range(100)) - guilty), -1]
    assert most[2:] == [10, 1]
    assert len([line for line in tries if line == 3]) <= 20


async def test_batch_compiles_at_most_max_background_grammars_at_a_time(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, now, most = AsyncEngine.check_grammar, 0, 0

    async def counting(self: AsyncEngine, grammar: Grammar, **options: int | None) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            await check(self, grammar)
        finally:
            now -= 1

    monkeypatch.setattr(AsyncEngine, "check_grammar", counting)
    async with opened(tmp_path, engine) as service:
        lines = [completion_line(number, guided_regex=f"[ab]{{{number + 1}}}", max_tokens=20) for number in range(12)]
        assert completed(await ended(service, (await begin(service, lines)).id)) == 12
    assert most == MAX_BACKGROUND_GRAMMARS


async def test_batch_answers_are_serialized_on_the_reader_thread(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, threads = GenerationTask.compute, set[str]()

    async def telling(self: GenerationTask, tenant: str = "") -> Callable[[], bytes]:
        encode_line_answer = await computed(self, tenant)

        def written() -> bytes:
            threads.add(threading.current_thread().name.rpartition("_")[0])
            return encode_line_answer()

        return written

    monkeypatch.setattr(GenerationTask, "compute", telling)
    async with opened(tmp_path, engine) as service:
        await ended(service, (await begin(service, LINES)).id)
    assert threads == {"tok-batch-reader"}
