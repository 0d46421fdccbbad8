"""Data parallelism: replicas give the tokens of one engine, share the load, and survive each other's death."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from support.engines import assert_all_given_back, cpu_engine, manager_of, random_prompts
from support.patience import PATIENCE, until
from support.paused_engine import gated
from support.replicas import replica_of, simulated_core
from support.schedules import engine_info, expected
from support.tiny_models import make_model
from tok_core import AsyncEngine, Engine, EngineConfig, EngineDead, RequestOutput, SamplingParams
from tok_core.messages import StepInput
from tok_core.replicas.replica import ProcessReplica
from tok_core.replicas.replica_record import ReplicaRecord
from tok_core.worker.runner import LaunchedStep, Runner
from tok_core.worker.startup import setup

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)  # of which the cache holds four
PROMPTS = random_prompts((5, 40, 33, 100, 17, 64, 3, 80), seed=1)
SAMPLED = [
    SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=5, logprobs=1),
    SamplingParams(n=100, temperature=1.0, max_tokens=6, seed=6),
    *(SamplingParams(temperature=0.8, top_p=0.9, max_tokens=20, seed=seed) for seed in range(6)),
]

ASKED: tuple[SamplingParams | list[SamplingParams], ...] = (GREEDY, SAMPLED)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("dp") / "llama", max_positions=16_384)


def config(path: Path, **options: int) -> EngineConfig:
    settings = {"dp": 2, "kv_cache_tokens": 65_536, "max_running": 64, "max_restarts": 1, **options}
    return EngineConfig(model=str(path), device="cpu", dtype="float32", **settings)  # type: ignore[arg-type]


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[list[list[int]]]]:
    """Return the tokens that one replica generates."""
    with cpu_engine(path) as one:
        return [ids(one.generate(PROMPTS, params)) for params in ASKED]


def test_two_thread_replicas_share_the_load_and_give_the_tokens_of_one(
    path: Path, wanted: list[list[list[list[int]]]]
) -> None:
    with cpu_engine(path, dp=2) as two:
        assert two.info.num_pages == 2 * 65_536 // 16
        assert two.info.max_running == 2 * 64
        assert [ids(two.generate(PROMPTS, params)) for params in ASKED] == wanted
        each = two.replica_stats()
        assert [one["ready"] for one in each] == [1, 1]
        assert min(one["output_tokens"] for one in each) > 100
        whole = two.stats()
        assert whole["replicas"] == whole["replicas_ready"] == 2
        for name in ("output_tokens", "steps", "requests_finished", "device_seconds", "pages_total"):
            assert whole[name] == sum(one[name] for one in each)
        assert whole["output_tokens"] == sum(len(one) for outputs in wanted for output in outputs for one in output)
        # The request for 100 samples is split between the replicas, so it counts twice.
        assert whole["requests_finished"] == 2 * len(PROMPTS) + 1


def test_prompts_that_share_a_prefix_hit_one_replicas_prefix_cache(path: Path) -> None:
    with cpu_engine(path, dp=2) as two:
        for prompt in random_prompts((200, 200, 200, 200), seed=3):
            for _ in range(2):
                two.generate([prompt], SHORT)
                (output,) = two.generate([[*prompt, 1, 2, 3]], SHORT)
                assert output.cached_tokens >= 192
        assert [one["requests_finished"] for one in two.replica_stats()] == [8, 8]


def test_samples_of_one_request_stream_from_both_replicas(path: Path) -> None:
    async def run() -> None:
        engine = AsyncEngine(config(path), in_process=True)
        await engine.start()
        try:
            params = SamplingParams(n=80, temperature=5.0, max_tokens=8, seed=1, ignore_eos=True)
            stream, other = engine.generate(PROMPTS[1], params), engine.generate(PROMPTS[1], params, stream=False)
            deltas = [delta async for delta in stream]
            output = await other.output()
            for index, sample in enumerate(output.outputs):
                assert sample.index == index
                assert [token for one in deltas if one.index == index for token in one.token_ids] == sample.token_ids
            assert len({tuple(sample.token_ids) for sample in output.outputs}) > 70
            aborted = engine.generate(PROMPTS[2], SamplingParams(n=80, max_tokens=900, ignore_eos=True))
            await anext(aiter(aborted))
            aborted.abort()
            assert {one.finish_reason for one in (await aborted.output()).outputs} == {"abort"}
            for number in range(2):
                assert engine.replica_stats()[number]["output_tokens"] > 200
                assert_all_given_back(manager_of(engine, number))
            assert [one.tokens for one in engine._core._router.loads] == [0, 0]
        finally:
            await engine.close()

    asyncio.run(run())


class Failing:
    """Fault that makes the steps of one replica fail."""

    def __init__(self) -> None:
        self.runner: Runner | None = None


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    one, launch = Failing(), Runner.launch

    def launch_or_fail(runner: Runner, step: StepInput) -> LaunchedStep:
        if runner is one.runner:
            raise RuntimeError("the device is gone")
        return launch(runner, step)

    monkeypatch.setattr(Runner, "launch", launch_or_fail)
    return one


async def test_replica_death_fails_only_requests_whose_tokens_were_streamed(path: Path, failing: Failing) -> None:
    engine = AsyncEngine(config(path), in_process=True)
    await engine.start()
    try:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        prompts = random_prompts((20,) * 8, seed=4)
        wanted = await asyncio.gather(*(engine.generate(prompt, params, stream=False).output() for prompt in prompts))
        with gated(engine, 20, replica=0), gated(engine, 20, replica=1):
            streams = [engine.generate(prompt, params, stream=i < 4) for i, prompt in enumerate(prompts)]
            for stream in streams[:4]:
                await anext(aiter(stream))
            where = [engine._core._open.by_rid[stream._request.rid].parts[0].replica for stream in streams]
            assert set(where[:4]) == set(where[4:]) == {0, 1}
            failing.runner = manager_of(engine, 1).ports._runner  # type: ignore[attr-defined]
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*(stream.output() for stream in streams), return_exceptions=True)
        for i, result in enumerate(results):
            if where[i] == 1 and i < 4:
                assert isinstance(result, EngineDead)
                assert "the device is gone" in str(result)
                assert "replica 1" in str(result)
            else:
                assert isinstance(result, RequestOutput)
                assert result.outputs[0].token_ids == wanted[i].outputs[0].token_ids
        assert [one["restarts"] for one in engine.replica_stats()] == [0, 1]
        await until(lambda: engine.stats()["replicas_ready"] == 2)
        failing.runner = manager_of(engine, 1).ports._runner  # type: ignore[attr-defined]  # one death more than max_restarts
        await asyncio.gather(*(engine.generate(prompt, SHORT, stream=False).output() for prompt in prompts))
        await until(lambda: engine.health().replicas[1].state == "failed")
        health = engine.health()
        assert (health.ok, health.state, health.replicas[0].state) == (True, "ready", "ready")
        assert "replica 1 is failed: " in health.detail
        assert "the device is gone" in health.detail
        before = engine.replica_stats()
        await asyncio.gather(*(engine.generate(prompt, SHORT).output() for prompt in prompts))
        assert engine.replica_stats()[1] == before[1]
        assert [one.tokens for one in engine._core._router.loads] == [0, 0]
        assert engine._core._token_store.blocks_used == 0
        # Replica 0 may be restarted once more; after that, no replica can come back.
        for state in ("ready", "failed"):
            failing.runner = manager_of(engine, 0).ports._runner  # type: ignore[attr-defined]
            with pytest.raises(EngineDead, match="the device is gone"):
                await engine.generate(prompts[0], SHORT, stream=False).output()
            await until(lambda: engine.health().state != "restarting")
            assert engine.health().state == state
        assert not engine.health().ok
    finally:
        await engine.close()


def test_failed_start_of_one_replica_raises_and_stops_the_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up, started = setup.set_up, threading.Event()

    def set_up_but_for_one(config: EngineConfig, replica: int = 0) -> object:
        if replica == 1:
            assert started.wait(PATIENCE)
            raise RuntimeError("no such device: 1")
        try:
            return set_up(config, replica)
        finally:
            started.set()

    monkeypatch.setattr(setup, "set_up", set_up_but_for_one)
    before = set(threading.enumerate())
    with pytest.raises(Exception, match="no such device: 1"):
        Engine(config(path), in_process=True)
    assert {one for one in threading.enumerate() if one.name == "replica"} <= before


async def test_two_process_replicas_give_the_tokens_of_one_and_survive_a_kill(
    path: Path, wanted: list[list[list[list[int]]]]
) -> None:
    before = set(psutil.Process().children())  # multiprocessing keeps processes of its own once it is used
    engine = AsyncEngine(config(path))
    await engine.start()
    try:
        children = [replica(engine, number).children for number in range(2)]
        assert len({child.pid for each in children for child in each.values()}) == 4
        streams = [engine.generate(prompt, GREEDY, stream=False) for prompt in PROMPTS]
        assert ids([await stream.output() for stream in streams]) == wanted[0]
        for number, role in ((0, "worker"), (1, "manager")):
            running = [engine.generate(prompt, LONG) for prompt in random_prompts((20,) * 8, seed=9)]
            for stream in running:
                await anext(aiter(stream))
            hit = [engine._core._open.by_rid[stream._request.rid].parts[0].replica == number for stream in running]
            assert sum(hit) == 4
            os.kill(replica(engine, number).children[role].pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):  # shorter than the step timeout
                for stream, dies in zip(running, hit, strict=True):
                    if dies:
                        with pytest.raises(EngineDead, match=role):
                            await stream.output()
            health = engine.health()
            assert health.ok
            assert health.detail.startswith(f"replica {number} is restarting: the {role} process")
            assert ids([await engine.generate(PROMPTS[0], GREEDY).output()]) == wanted[0][:1]
            for stream, dies in zip(running, hit, strict=True):
                if not dies:  # its replica is alive
                    async with asyncio.timeout(PATIENCE):
                        assert sum([len((await anext(aiter(stream))).token_ids) for _ in range(50)]) >= 50
                    stream.abort()
            await until(lambda: engine.stats()["replicas_ready"] == 2)
            assert engine.health().detail == ""
        assert [one["restarts"] for one in engine.replica_stats()] == [1, 1]
        streams = [engine.generate(prompt, GREEDY, stream=False) for prompt in PROMPTS]
        assert ids([await stream.output() for stream in streams]) == wanted[0]
    finally:
        await engine.close()
    left = set(psutil.Process().children()) - before
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


def replica(engine: AsyncEngine, number: int) -> ProcessReplica:
    one = engine._core._replica_set.records[number].replica
    assert isinstance(one, ProcessReplica)
    return one


def test_unreported_tokens_of_a_dead_replica_are_recomputed_by_another() -> None:
    core = simulated_core(engine_info(), dp=2)
    for number in range(2):
        replica_of(core, number).be_ready()
    params = SamplingParams(n=3, max_tokens=12, ignore_eos=True)
    request = core.submit([1, 2, 3], params, None, lambda requests: None, stream=False)
    lost = request.parts[0].replica
    while core._token_store.blocks_used < 3:
        replica_of(core, lost).turn()
    begun = [request.timings.first_token]
    replica_of(core, lost).die("it was told to")
    assert core._token_store.blocks_used == 0
    assert begun[0] is not None
    assert request.timings.first_token is None
    assert request.parts[0].replica != lost
    assert core._router.loads[lost].tokens == 0
    replica_of(core, 1 - lost).settle()
    found = [one.token_ids for one in request.output().outputs]
    assert found == [expected([1, 2, 3], sample, params) for sample in range(3)]
    core.close()


def test_counters_do_not_decrease_when_a_replica_restarts() -> None:
    core = simulated_core(engine_info(), dp=2)
    replicas = [replica_of(core, number) for number in range(2)]
    for one in replicas:
        one.be_ready()
    for prompt in ([1, 2, 3], [4, 5, 6]):
        core.submit(prompt, SHORT, None, lambda requests: None, stream=False)
    for one in replicas:
        one.settle()
    before = core.stats()
    assert before["output_tokens"] == 8
    replicas[0].die("it was told to")
    assert core.stats()["output_tokens"] == 8
    assert core.stats()["pages_total"] == before["pages_total"]
    replica_of(core, 0).be_ready()
    for prompt in ([1, 2, 3], [4, 5, 6]):
        core.submit(prompt, SHORT, None, lambda requests: None, stream=False)
    for number in range(2):
        replica_of(core, number).settle()
    assert core.stats()["output_tokens"] == 16
    assert core.stats()["restarts"] == 1
    core.close()


def test_restart_pause_doubles_with_each_replica_death_in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    core = simulated_core(engine_info(), dp=2, max_restarts=3)
    monkeypatch.setattr("tok_core.replicas.replica_record.FIRST_PAUSE_SECONDS", 0.25)
    pauses, pause = list[float](), ReplicaRecord.pause

    def noted(life: ReplicaRecord) -> float:
        pauses.append(pause(life))
        return pauses[-1]

    monkeypatch.setattr(ReplicaRecord, "pause", noted)
    for number in range(2):
        replica_of(core, number).be_ready()
    took = []
    for _ in range(3):
        began = time.monotonic()
        replica_of(core, 0).die("it was told to")
        took.append(time.monotonic() - began)
        replica_of(core, 0).be_ready()
    assert pauses == [0.0, 0.25, 0.5]
    assert all(seconds >= at_least for seconds, at_least in zip(took, pauses, strict=True))
    core.close()
