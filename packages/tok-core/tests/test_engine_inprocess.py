"""Faults of an in-process replica: open requests fail at once, and the replica restarts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from support.engines import assert_all_given_back, manager_of
from support.patience import PATIENCE, until, wait_until
from support.tiny_models import make_model
from tok_core import AsyncEngine, Engine, EngineConfig, EngineDead, SamplingParams
from tok_core.messages import Failed, StepInput, StepOutput, ToEngine
from tok_core.replicas.replica import ThreadReplica
from tok_core.worker.runner import LaunchedStep, Runner

LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class Fault:
    """Fault that raises once, a number of steps after it is armed."""

    def __init__(self) -> None:
        self._left: int | None = None

    def arm(self, steps: int = 0) -> None:
        self._left = steps

    def strike(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                raise RuntimeError("the device is gone")


@pytest.fixture(params=["launch", "output"])
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Fail the launch of a step, or the wait for its tokens: errors of a device surface in either."""
    one, launch, output = Fault(), Runner.launch, LaunchedStep.output

    def launch_or_fail(runner: Runner, step: StepInput) -> LaunchedStep:
        one.strike()
        return launch(runner, step)

    def output_or_fail(launched: LaunchedStep) -> StepOutput:
        one.strike()
        return output(launched)

    if request.param == "launch":
        monkeypatch.setattr(Runner, "launch", launch_or_fail)
    else:
        monkeypatch.setattr(LaunchedStep, "output", output_or_fail)
    return one


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = make_model("llama", tmp_path_factory.mktemp("inprocess") / "llama")
    return EngineConfig(model=str(path), device="cpu", kv_cache_tokens=8192, max_running=16, max_restarts=2)


async def test_failed_step_fails_open_requests_and_the_replica_restarts(config: EngineConfig, fault: Fault) -> None:
    await asyncio.to_thread(int)  # start the thread in which the engine's start and close will run
    before = set(threading.enumerate())
    engine = AsyncEngine(config, in_process=True)
    await engine.start()
    try:
        expected = await engine.generate([1, 2, 3], SHORT).output()
        for times in (1, 2):
            # More requests than may run at once.
            fault.arm(steps=20)  # in the middle of the first answers
            streams = [engine.generate([1, 2, 3 + i], LONG, stream=i % 2 == 0) for i in range(24)]
            assert (await anext(aiter(streams[0]))).token_ids
            async with asyncio.timeout(PATIENCE):
                results = await asyncio.gather(*(stream.output() for stream in streams), return_exceptions=True)
            assert [type(result) for result in results] == [EngineDead] * len(streams)
            assert "the device is gone" in str(results[-1])
            await until(lambda: engine.health().state == "ready")
            again = await engine.generate([1, 2, 3], SHORT).output()
            assert again.outputs[0].token_ids == expected.outputs[0].token_ids
            assert engine.stats()["restarts"] == times
        assert_all_given_back(manager_of(engine))
        assert engine._core._token_store.blocks_used == 0
        fault.arm(steps=3)  # one failure more than max_restarts
        last = engine.generate([1, 2, 3], LONG)
        with pytest.raises(EngineDead, match="the device is gone"):
            await last.output()
        await until(lambda: engine.health().state == "failed")
        assert "the device is gone" in engine.health().detail
        with pytest.raises(EngineDead, match="failed"):
            engine.generate([1, 2, 3], SHORT)
    finally:
        await engine.close()
    assert engine.health().state == "closed"
    await until(lambda: set(threading.enumerate()) <= before)


def test_blocking_engine_raises_on_a_failed_step_and_serves_again(config: EngineConfig, fault: Fault) -> None:
    with Engine(config, in_process=True) as engine:
        expected = engine.generate([[7, 8]], SHORT)
        fault.arm()
        with pytest.raises(EngineDead, match="the device is gone"):
            engine.generate([[7, 8], [9]], SHORT)
        wait_until(lambda: engine.health().ok)
        again = engine.generate([[7, 8]], SHORT)
        assert again[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
        assert_all_given_back(manager_of(engine))


async def test_requests_and_aborts_before_a_failure_report_are_answered(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(config, in_process=True)
    await engine.start()
    try:
        replica = engine._core._replica_set.records[0].replica
        assert isinstance(replica, ThreadReplica)
        hear, failing, resume_held = replica._report, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def hear_late(message: ToEngine) -> None:
            if isinstance(message, Failed):
                loop.call_soon_threadsafe(failing.set)
                assert resume_held.wait(PATIENCE)
            hear(message)

        monkeypatch.setattr(replica, "_report", hear_late)
        launch = Runner.launch

        def fail_once(runner: Runner, step: StepInput) -> LaunchedStep:
            monkeypatch.setattr(Runner, "launch", launch)
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(Runner, "launch", fail_once)
        kept, aborted = engine.generate([1, 2, 3], LONG), engine.generate([1, 2, 4], LONG)
        async with asyncio.timeout(PATIENCE):
            await failing.wait()
            try:
                aborted.abort()
                late = engine.generate([1, 2, 5], LONG)
            finally:
                resume_held.set()
            assert [one.finish_reason for one in (await aborted.output()).outputs] == ["abort"]
            for stream in (kept, late):
                with pytest.raises(EngineDead, match="the device is gone"):
                    await stream.output()
    finally:
        await engine.close()
