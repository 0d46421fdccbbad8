"""A sleeping engine gives its memory back and computes nothing; after it wakes up, greedy tokens are as before."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from support.engines import async_engine, cpu_engine, manager_of, random_prompts
from support.patience import until
from support.paused_engine import held
from support.tiny_models import make_model, reference_greedy
from tok_core import AsyncEngine, Engine, EngineConfig, EngineError, InvalidField, ModelError, SamplingParams
from tok_core.messages import EngineCommand, ToManager
from tok_core.worker import Runner
from tok_core.worker.sleep import MemoryRegion

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPTS = random_prompts((5, 33, 64, 65))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG_TOKENS = 300
LONG = SamplingParams(temperature=0, max_tokens=LONG_TOKENS, ignore_eos=True)
TRIES = 20  # to put long requests to sleep before they end
QUIET_SECONDS = 0.2  # for which a sleeping engine is watched
MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("sleep") / "model", seed=3)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("new") / "model", seed=4)


def tokens(engine: Engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def expected(path: Path) -> list[list[int]]:
    return [ids for ids, _ in reference_greedy(path, PROMPTS, 12)]


def runner_of(engine: object) -> Runner:
    runner: Runner = manager_of(engine).ports._runner  # type: ignore[attr-defined]
    return runner


def sleeping(path: Path, **options: Any) -> Any:
    return cpu_engine(path, enable_sleep_mode=True, **options)


def sleeping_async(path: Path, **options: Any) -> AbstractAsyncContextManager[AsyncEngine]:
    return async_engine(path, enable_sleep_mode=True, **options)


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_after_a_sleep_equal_those_before_and_nothing_stays_cached(path: Path, level: int) -> None:
    with sleeping(path) as engine:
        assert tokens(engine) == expected(path)
        addresses = [one.data_ptr() for one in (*runner_of(engine).model.parameters(), runner_of(engine).state.kv)]
        for _ in range(2):
            engine.sleep(level)
            assert engine.is_sleeping
            assert engine.health().ok
            assert not engine.is_paused
            assert manager_of(engine).paging.allocator.free == manager_of(engine).paging.num_pages
            assert not runner_of(engine).state.kv.any()
            dropped = not any(one.any() for one in runner_of(engine).model.parameters())
            assert dropped == (level == 2)
            engine.wake_up()
            assert not engine.is_sleeping
            outputs = engine.generate(PROMPTS, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected(path)
            assert [output.cached_tokens for output in outputs] == [0] * len(PROMPTS)
        assert addresses == [
            one.data_ptr() for one in (*runner_of(engine).model.parameters(), runner_of(engine).state.kv)
        ]


WORKERS = pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=["tp 2", "pp 2", "dp 2"])


@WORKERS
def test_all_workers_of_all_replicas_sleep_update_and_wake_up(path: Path, new: Path, options: dict[str, Any]) -> None:
    settings = {"kv_cache_tokens": 8192, "max_running": 8, "dtype": "float32", "device": "cpu", **options}
    with Engine(EngineConfig(model=str(path), enable_sleep_mode=True, **settings)) as engine:
        assert tokens(engine) == expected(path)
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            assert tokens(engine) == expected(path)
        engine.sleep(2)
        engine.wake_up(["weights"])
        assert engine.is_sleeping
        engine.update_weights(str(new))
        assert engine.is_sleeping
        engine.wake_up(["kv_cache"])
        assert tokens(engine) == expected(new)
        engine.sleep(2)
        engine.wake_up()  # reads the weights of the update again
        assert tokens(engine) == expected(new)


def test_each_tag_sleeps_and_wakes_by_itself(path: Path, new: Path) -> None:
    with sleeping(path) as engine:
        kept = engine.generate([PROMPTS[2]], GREEDY)[0]
        engine.sleep(2, tags=["weights"])
        engine.wake_up(["kv_cache"])  # awake already
        assert engine.is_sleeping
        engine.wake_up(["weights"])
        assert not engine.is_sleeping
        assert engine.generate([PROMPTS[2]], GREEDY)[0].outputs[0].token_ids == kept.outputs[0].token_ids
        engine.sleep(2, tags=["kv_cache"])
        assert all(one.any() for one in runner_of(engine).model.parameters())
        assert engine.update_weights(str(new)) == "1"
        assert engine.is_sleeping
        engine.wake_up(["weights", "kv_cache"])
        assert tokens(engine) == expected(new)


def test_sleeping_twice_and_waking_up_without_a_sleep_change_nothing(path: Path) -> None:
    with sleeping(path) as engine:
        engine.wake_up()
        engine.wake_up(["weights"])
        assert tokens(engine) == expected(path)
        for levels in ((1, 1), (2, 1), (1, 2)):
            for level in levels:
                engine.sleep(level)
            engine.wake_up(["weights"])
            engine.wake_up(["weights"])
            assert engine.is_sleeping
            engine.wake_up()
            engine.wake_up()
            assert tokens(engine) == expected(path)


@pytest.mark.parametrize("options", [{}, {"in_process": False, "pp": 2}, {"in_process": False, "dp": 2}])
async def test_kept_requests_are_computed_again_and_later_ones_wait(path: Path, options: dict[str, Any]) -> None:
    async with sleeping_async(path, **options) as engine:
        for _ in range(TRIES):  # until they sleep before they end, which a busy machine may prevent
            streams = [engine.generate([*PROMPTS[0], i], LONG) for i in range(12)]  # more than run at a time
            forks = engine.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, n=4))
            await until(lambda: streams[0].output_tokens > 5)  # noqa: B023
            await engine.sleep(2)
            if streams[0].output_tokens < LONG_TOKENS:
                break
            await engine.wake_up()
        late = engine.generate(PROMPTS[0], GREEDY)
        first = engine.stats()
        await asyncio.sleep(QUIET_SECONDS)
        assert engine.stats()["steps"] == first["steps"]
        assert engine.stats()["output_tokens"] == first["output_tokens"]
        assert engine.stats()["preemptions"] > 0
        await engine.resume()  # ends no sleep
        await asyncio.sleep(QUIET_SECONDS)
        assert engine.stats()["steps"] == first["steps"]
        late_abort = engine.generate(PROMPTS[0], GREEDY, stream=False)
        late_abort.abort()
        assert (await late_abort.output()).outputs[0].finish_reason == "abort"
        await engine.wake_up()
        outputs = [await stream.output() for stream in streams]
        together = reference_greedy(path, [output.prompt_token_ids for output in outputs], 300)
        assert [output.outputs[0].token_ids for output in outputs] == [ids for ids, _ in together]
        wanted = reference_greedy(path, [PROMPTS[1]], 60)[0][0]
        assert [one.token_ids for one in (await forks.output()).outputs] == [wanted] * 4
        assert (await late.output()).outputs[0].token_ids == expected(path)[0]


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_open_requests_end_before_a_sleep_that_aborts_or_waits(path: Path, mode: Any) -> None:
    async with sleeping_async(path) as engine:
        with held(engine) if mode == "abort" else nullcontext():
            stream = engine.generate(PROMPTS[0], LONG)
            await until(lambda: stream.output_tokens > 5)
            await engine.sleep(1, mode=mode)
        completion = (await stream.output()).outputs[0]
        assert completion.finish_reason == ("abort" if mode == "abort" else "length")
        await engine.pause("wait")  # returns: nothing runs
        await engine.wake_up()
        assert engine.is_paused
        late = engine.generate(PROMPTS[0], GREEDY)
        await asyncio.sleep(QUIET_SECONDS)
        assert late.output_tokens == 0
        await engine.resume()
        assert (await late.output()).outputs[0].token_ids == expected(path)[0]


async def test_replica_that_restarts_in_a_sleep_sleeps_until_all_wake_up(path: Path) -> None:
    async with sleeping_async(path, in_process=False) as engine:
        await engine.sleep(2)
        replica = engine._core._replica_set.records[0].replica
        os.kill(replica.children["worker"].pid, signal.SIGKILL)  # type: ignore[union-attr]
        await until(lambda: engine.stats()["restarts"] == 1 and engine.health().ok)
        late = engine.generate(PROMPTS[0], GREEDY)
        await asyncio.sleep(QUIET_SECONDS)
        assert late.output_tokens == 0
        await engine.wake_up()
        assert (await late.output()).outputs[0].token_ids == expected(path)[0]


def test_memory_is_given_back_and_taken_again(path: Path, tmp_path: Path) -> None:
    process = psutil.Process()
    with sleeping(path, kv_cache_tokens=1 << 19) as engine:
        state = runner_of(engine).state
        state.kv.fill_(1)  # as if all pages had been used
        full, size = process.memory_info().rss, state.kv.nbytes
        assert size > 100 * MIB
        engine.sleep(2)
        assert full - process.memory_info().rss > 0.9 * size
        engine.wake_up()
        assert tokens(engine) == expected(path)


@pytest.mark.parametrize("failing", [0, 1])
def test_replicas_wake_up_together_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    with sleeping(path, dp=2) as engine:
        for call, count in ((engine.wake_up, 1), (engine.sleep, 0)):
            if count:
                engine.sleep(1)
            memory = manager_of(engine, failing).ports._runner._memory  # type: ignore[attr-defined]
            name = "restore" if count else "release"

            def refuse(**_: object) -> None:
                raise EngineError("no memory is left")

            with monkeypatch.context() as patch:
                patch.setattr(memory.kv_cache, name, refuse)
                with pytest.raises(EngineError, match="no memory is left"):
                    call()
            for number in range(2):
                regions = manager_of(engine, number).ports._runner._memory  # type: ignore[attr-defined]
                assert regions.kv_cache.released == bool(count)
            assert engine.is_sleeping == bool(count)
            engine.wake_up()
            assert tokens(engine) == expected(path)


def test_dropped_weights_that_cannot_be_read_again_leave_the_engine_asleep(path: Path, tmp_path: Path) -> None:
    other = make_model("llama", tmp_path / "other", seed=5)
    with sleeping(path) as engine:
        engine.update_weights(str(other))
        engine.sleep(2)
        (other / "model.safetensors").rename(other / "gone")
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            engine.wake_up()
        assert engine.is_sleeping
        engine.wake_up(["weights"])
        engine.update_weights(str(path))
        engine.wake_up()
        assert tokens(engine) == expected(path)


def test_relative_directories_hold_after_the_current_one_has_changed(
    path: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with sleeping(Path(path.name)) as engine:
        monkeypatch.chdir(new.parent)
        engine.sleep(2)
        engine.wake_up()
        assert tokens(engine) == expected(path)
        engine.update_weights(new.name)
        monkeypatch.chdir(tmp_path)
        engine.sleep(2)
        engine.wake_up()
        assert tokens(engine) == expected(new)


@pytest.mark.parametrize("action", ["pause", "wake_up", "check_weights", "load_weights"])
def test_interrupted_wake_up_leaves_the_engine_asleep(path: Path, action: str) -> None:
    with sleeping(path) as engine:
        engine.sleep(2)
        replica = engine._core._replica_set.records[0].replica
        send = replica.send

        def send_and_interrupt(messages: Sequence[ToManager]) -> None:
            send(messages)
            if any(isinstance(message, EngineCommand) and message.action == action for message in messages):
                signal.raise_signal(signal.SIGINT)

        replica.send = send_and_interrupt
        with pytest.raises(KeyboardInterrupt):
            engine.wake_up()
        del replica.send
        assert engine.is_sleeping
        assert not engine.is_paused
        engine.wake_up()
        assert tokens(engine) == expected(path)


def test_errors_name_the_field_and_what_is_allowed(path: Path) -> None:
    with cpu_engine(path) as engine:
        for call in (engine.sleep, engine.wake_up):
            with pytest.raises(InvalidField, match="enable_sleep_mode is False; allowed: true from the engine's start"):
                call()
        assert not engine.is_sleeping
    with sleeping(path) as engine:
        with pytest.raises(InvalidField, match="level is 0; allowed: 1, 2"):
            engine.sleep(0)
        with pytest.raises(InvalidField, match="tags is 'graphs'; allowed: weights, kv_cache"):
            engine.sleep(tags=["graphs"])
        for tags in (5, "weights"):
            with pytest.raises(InvalidField, match=f"tags is {tags!r}; allowed: a list of weights, kv_cache"):
                engine.sleep(tags=tags)
        with pytest.raises(InvalidField, match="mode is 'soft'; allowed: keep, wait, abort"):
            engine.sleep(mode="soft")
        assert not engine.is_sleeping
        engine.sleep()
        with pytest.raises(InvalidField, match=r"the weights sleep; call wake_up\(\[\"weights\"\]\) first"):
            engine.update_weights(str(path))
        engine.wake_up()
        assert tokens(engine) == expected(path)


def test_small_tensors_share_memory_and_large_ones_have_their_own() -> None:
    region = MemoryRegion(torch.device("cpu"))
    shapes = [((3,), torch.float32), ((0, 5), torch.bfloat16), ((1 << 19,), torch.float32), ((7, 9), torch.int8)]
    found = [region.zeros(*one) for one in shapes]
    assert [(tuple(one.shape), one.dtype) for one in found] == shapes
    assert region.size == 4 * MIB
    for i, one in enumerate(found):
        assert not one.any()
        one.fill_(i + 1)
    assert all((one == i + 1).all() for i, one in enumerate(found))
    assert all(one.data_ptr() % 512 == 0 for one in found if one.numel())
    region.release(keep=True)
    region.restore()
    assert all((one == i + 1).all() for i, one in enumerate(found))
    region.release(keep=False)
    assert region.released
    region.restore()
    assert not any(one.any() for one in found)
