"""A paused engine computes nothing: open requests stop where they are, end, or are aborted; new ones wait."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.engines import async_engine
from support.patience import PATIENCE, until
from support.paused_engine import ENDLESS, ENDLESS_POSITIONS
from support.tiny_models import make_model, reference_greedy
from tok_core import AsyncEngine, EngineClosed, EngineResumed, InvalidField, RequestOutput, SamplingParams
from tok_core.engine import RequestStream

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPT = [1, 2, 3, 4, 5]
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
QUIET_SECONDS = 0.2  # for which a paused engine is watched
TRIES = 20  # to pause requests before they end


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("pause") / "llama", seed=3)


async def started(engine: AsyncEngine, count: int = 1) -> list[RequestStream]:
    """Return long streams, each of which has received a token."""
    streams = [engine.generate([*PROMPT, i], LONG) for i in range(count)]
    await until(lambda: all(stream.output_tokens > 5 for stream in streams))
    return streams


async def until_midway(
    begin: Callable[[], Awaitable[list[RequestStream]]], engine: AsyncEngine, mode: Any
) -> list[RequestStream]:
    """Begin streams and pause the engine before any of them ends; begin anew if the machine was too busy for that."""
    for _ in range(TRIES):
        streams = await begin()
        await engine.pause(mode)
        if max(stream.output_tokens for stream in streams) < 300:
            return streams
        await engine.resume()
    raise AssertionError(f"{TRIES} times, a pause came after the end of a long request")


async def assert_idle(engine: AsyncEngine) -> None:
    assert engine.is_paused
    first = engine.stats()
    await asyncio.sleep(QUIET_SECONDS)
    assert engine.stats()["steps"] == first["steps"]
    assert engine.stats()["output_tokens"] == first["output_tokens"]
    assert engine.stats()["steps_in_flight"] == 0


def assert_exact(path: Path, outputs: list[RequestOutput], count: int) -> None:
    wanted = reference_greedy(path, [output.prompt_token_ids for output in outputs], count)
    assert [output.outputs[0].token_ids for output in outputs] == [ids for ids, _ in wanted]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


EVERYWHERE = pytest.mark.parametrize(
    "options", [{}, {"in_process": False, "pp": 2}, {"in_process": False, "dp": 2}], ids=["thread", "pp 2", "dp 2"]
)


@EVERYWHERE
async def test_kept_requests_go_on_where_they_stopped_and_later_ones_wait(path: Path, options: dict[str, Any]) -> None:
    async with async_engine(path, **options) as engine:
        assert not engine.is_paused
        streams = await until_midway(lambda: started(engine, 4), engine, "keep")
        counts = [stream.output_tokens for stream in streams]
        late = engine.generate(PROMPT, SHORT)
        await assert_idle(engine)
        assert [stream.output_tokens for stream in streams] == counts
        computed = engine.stats()["computed_tokens"]
        await engine.resume()
        assert not engine.is_paused
        assert_exact(path, [await stream.output() for stream in streams], 300)
        assert_exact(path, [await late.output()], 4)
        left = sum(300 - count for count in counts)
        assert engine.stats()["computed_tokens"] - computed < left + 40  # the kept prompts were not computed again


@EVERYWHERE
async def test_running_requests_end_before_a_pause_that_waits(path: Path, options: dict[str, Any]) -> None:
    async with async_engine(path, **options) as engine:
        streams = await started(engine, 12)  # more than run at a time
        pause = asyncio.ensure_future(engine.pause("wait"))
        await until(lambda: engine._core._dispatcher.holding)
        late = [engine.generate(PROMPT, SHORT), engine.generate(PROMPT, SHORT, stream=False)]
        embedding = asyncio.ensure_future(engine.embed([PROMPT]))
        await pause
        assert [stream.output_tokens for stream in streams] == [300] * 12
        await assert_idle(engine)
        assert [one.output_tokens for one in late] == [0, 0]
        assert not embedding.done()
        late[1].abort()
        assert (await late[1].output()).outputs[0].finish_reason == "abort"
        await engine.resume()
        assert_exact(path, [await stream.output() for stream in streams], 300)
        assert_exact(path, [await late[0].output()], 4)
        assert len(await embedding) == 1


@EVERYWHERE
async def test_aborted_samples_keep_their_tokens_and_later_requests_wait(path: Path, options: dict[str, Any]) -> None:
    async with async_engine(path, **options) as engine:

        async def begin() -> list[RequestStream]:
            streams = await started(engine, 3)
            streams.append(engine.generate(PROMPT, LONG, stream=False))
            await until(lambda: engine.stats()["requests_running"] == 4 or streams[0].output_tokens == 300)
            return streams

        streams = await until_midway(begin, engine, "abort")
        late = engine.generate(PROMPT, SHORT)
        for stream in streams:
            output = await stream.output()
            ids = output.outputs[0].token_ids
            assert output.outputs[0].finish_reason == "abort"
            assert ids == reference_greedy(path, [output.prompt_token_ids], 300)[0][0][: len(ids)]
        assert all(stream.output_tokens > 5 for stream in streams[:3])
        await assert_idle(engine)
        assert late.output_tokens == 0
        await engine.resume()
        assert_exact(path, [await late.output()], 4)


async def test_pauses_may_be_repeated_and_a_paused_engine_updates_its_weights(path: Path, tmp_path: Path) -> None:
    new = make_model("llama", tmp_path / "new", seed=1)
    async with async_engine(path) as engine:
        await engine.resume()
        await engine.pause()
        await engine.pause("wait")
        stream = engine.generate(PROMPT, SHORT)
        assert await engine.update_weights(str(new)) == "1"
        await assert_idle(engine)
        await engine.resume()
        await engine.resume()
        output = await stream.output()
        assert_exact(new, [output], 4)
        assert output.outputs[0].weight_spans is None
        assert output.outputs[0].weight_version == "1"
        with pytest.raises(InvalidField, match="mode is 'soft'; allowed: keep, wait, abort"):
            await engine.pause("soft")  # type: ignore[arg-type]


async def test_cleared_cache_is_not_read_again_even_while_samples_run(path: Path) -> None:
    async with async_engine(path) as engine:
        prompt = np.arange(64).tolist()
        first = await engine.generate(prompt, SHORT).output()
        again = await engine.generate(prompt, SHORT).output()
        running_stream = engine.generate(prompt, LONG)
        await until(lambda: running_stream.output_tokens > 5)
        await engine.reset_prefix_cache()
        anew = await engine.generate(prompt, SHORT).output()
        warm = await engine.generate(prompt, SHORT).output()
        assert [one.cached_tokens for one in (first, again, anew, warm)] == [0, 48, 0, 48]
        assert first.outputs[0].token_ids == again.outputs[0].token_ids == anew.outputs[0].token_ids
        assert_exact(path, [await running_stream.output()], 300)


async def test_replica_restarted_while_paused_is_paused_with_the_new_weights(path: Path, tmp_path: Path) -> None:
    new = make_model("llama", tmp_path / "new", seed=1)
    async with async_engine(path, in_process=False, max_restarts=2) as engine:
        await engine.update_weights(str(new))
        await engine.pause()
        replica = engine._core._replica_set.records[0].replica
        os.kill(replica.children["worker"].pid, signal.SIGKILL)  # type: ignore[union-attr]
        await until(lambda: engine.stats()["restarts"] == 1 and engine.health().ok)
        stream = engine.generate(PROMPT, SHORT)
        await assert_idle(engine)
        await engine.resume()
        output = await stream.output()
        assert_exact(new, [output], 4)
        assert output.weight_version == "1"


async def test_close_ends_a_pause_that_waits(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "endless", max_positions=ENDLESS_POSITIONS)
    async with async_engine(path, in_process=False, kv_cache_tokens=ENDLESS_POSITIONS) as engine:
        stream = engine.generate(PROMPT, replace(LONG, max_tokens=ENDLESS))
        pause = asyncio.ensure_future(engine.pause("wait"))
        await until(lambda: engine._core._dispatcher.holding)
        await engine.close()
        with pytest.raises(EngineClosed):
            await pause
        with pytest.raises(EngineClosed):
            await stream.output()


@asynccontextmanager
async def endless(path: Path, **options: Any) -> AsyncIterator[tuple[AsyncEngine, RequestStream]]:
    """Return an engine, and a request of it that does not end within a test."""
    model = make_model("llama", path / "endless", max_positions=ENDLESS_POSITIONS)
    async with async_engine(model, kv_cache_tokens=ENDLESS_POSITIONS, **options) as engine:
        stream = engine.generate(PROMPT, replace(LONG, max_tokens=ENDLESS))
        await until(lambda: stream.output_tokens > 5)
        yield engine, stream
        stream.abort()
        await stream.output()


async def test_resume_ends_a_pause_or_sleep_that_waits_and_requests_go_on(tmp_path: Path) -> None:
    async with endless(tmp_path, enable_sleep_mode=True) as (engine, _):
        for waiting in (engine.pause("wait"), engine.sleep(mode="wait")):
            task = asyncio.ensure_future(waiting)
            await until(lambda: engine._core._dispatcher.holding)
            late = engine.generate(PROMPT, SHORT)
            await engine.resume()
            with pytest.raises(EngineResumed, match="resumed before all requests had ended"):
                await task
            assert (engine.is_paused, engine.is_sleeping) == (False, False)
            assert len((await late.output()).outputs[0].token_ids) == 4
            assert engine.open_requests == 1


@pytest.mark.parametrize("mode", ["abort", "keep", "retract"])
async def test_pause_of_another_mode_takes_the_place_of_one_that_waits(tmp_path: Path, mode: Any) -> None:
    async with endless(tmp_path) as (engine, stream):
        waiting = [asyncio.ensure_future(engine.pause("wait")) for _ in range(2)]
        await until(lambda: engine._core._dispatcher.holding)
        await asyncio.sleep(QUIET_SECONDS)
        assert not any(task.done() for task in waiting)  # the second one waits, too
        await engine.pause(mode)
        await asyncio.gather(*waiting)
        await assert_idle(engine)
        if mode == "abort":
            assert (await stream.output()).outputs[0].finish_reason == "abort"
        count = stream.output_tokens
        await engine.resume()
        if mode != "abort":
            await until(lambda: stream.output_tokens > count)


async def test_calls_that_wait_do_not_keep_others_from_the_event_loops_threads(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    async with endless(tmp_path) as (engine, _):
        waiting = [asyncio.ensure_future(engine.pause("wait")) for _ in range(2)]
        waiting.append(asyncio.ensure_future(engine.reset_prefix_cache()))
        await until(lambda: engine._core._dispatcher.holding)
        assert await asyncio.wait_for(asyncio.to_thread(int), PATIENCE) == 0
        await engine.pause("keep")
        await asyncio.gather(*waiting)
