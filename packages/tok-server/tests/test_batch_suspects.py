"""Lines that kill the engine, or are dear to check or to write down: none is at another's cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from support.batch_services import LINES, begin, completed, ended, made_engine, opened, outputs
from support.batching import completion_line, custom_ids, read_jsonl
from tok_core import AsyncEngine, EngineDead, RequestOutput
from tok_core.grammar import Grammar
from tok_server.batch.suspects import Guilty, Suspects
from tok_server.batch.to_its_end import to_its_end
from tok_server.endpoints import GRAMMARS, Generation


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    found = made_engine(tiny_model)
    asyncio.run(found.start())
    yield found
    asyncio.run(found.close())


async def test_what_a_thread_does_is_waited_for_though_it_is_no_longer_wanted() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        begun.set()
        assert go_on.wait(60)
        done.append(1)

    task = asyncio.create_task(to_its_end(asyncio.to_thread(work)))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


def end(engine: AsyncEngine) -> None:
    """The replica dies, as where its worker does."""
    life = engine._core._fleet.lives[0]
    replica = life.replica
    assert replica is not None
    replica.close()
    engine._core._fleet._die(life, replica, "its worker has ended")


async def test_of_lines_that_were_open_when_the_engine_died_only_the_guilty_one_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made_engine(tiny_model)
    computed, guilty, deaths = Generation._outputs, [77, 77], list[int]()

    async def killing(self: Generation) -> list[RequestOutput]:
        if self._job.prompts[0] != guilty:
            return await computed(self)
        open_too = asyncio.create_task(computed(self))
        await asyncio.sleep(0.01)  # others are submitted behind it
        deaths.append(engine.open_requests)
        await asyncio.to_thread(end, engine)
        return await open_too

    monkeypatch.setattr(Generation, "_outputs", killing)
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
    assert deaths[0] > deaths[1] >= deaths[2] == 1  # by its second turn others may all have been answered
    assert len(deaths) == 3


async def test_suspects_are_computed_few_at_a_time_and_then_alone_before_any_other_line() -> None:
    suspects, first, guilty = Suspects(), asyncio.Event(), {3, 50}
    running, most, tries = set[int](), [0] * 4, [0] * 100

    async def once(line: int) -> int:
        tries[line] += 1
        if tries[line] == 1:
            await first.wait()
            raise EngineDead("all of them were open")
        running.add(line)
        most[tries[line]] = max(most[tries[line]], len(running))
        await asyncio.sleep(0)
        beside = running & guilty
        await asyncio.sleep(0)
        running.discard(line)
        if beside:
            raise EngineDead("those beside it were open")
        return line

    async def other() -> int:
        assert not running
        return -1

    tasks = [asyncio.create_task(suspects.compute(partial(once, line))) for line in range(100)]
    await asyncio.sleep(0)
    first.set()
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(suspects.compute(other)))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert {line for line, one in enumerate(found) if isinstance(one, Guilty)} == guilty
    assert [one for one in found if not isinstance(one, Guilty)] == [*sorted(set(range(100)) - guilty), -1]
    assert most[2:] == [10, 1]
    assert len([line for line in tries if line == 3]) <= 20


async def test_grammars_of_a_batch_are_compiled_few_at_a_time(
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
    assert most == GRAMMARS


async def test_answers_are_written_down_on_another_thread_than_that_of_the_store(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, threads = Generation.compute, set[str]()

    async def telling(self: Generation) -> Callable[[], bytes]:
        write = await computed(self)

        def written() -> bytes:
            threads.add(threading.current_thread().name.rpartition("_")[0])
            return write()

        return written

    monkeypatch.setattr(Generation, "compute", telling)
    async with opened(tmp_path, engine) as service:
        await ended(service, (await begin(service, LINES)).id)
    assert threads == {"tok-batch-reader"}
