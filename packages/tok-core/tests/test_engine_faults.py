"""Process deaths: open requests end with an error, the engine restarts, and no process is orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.patience import PATIENCE, until
from support.paused_engine import ENDLESS, ENDLESS_POSITIONS
from support.tiny_models import make_model
from tok_core import AsyncEngine, Engine, EngineConfig, EngineDead, InvalidField, ModelError, SamplingParams
from tok_core.replicas.replica import ProcessReplica

LONG = SamplingParams(max_tokens=ENDLESS, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_model("llama", tmp_path_factory.mktemp("faults") / "llama", max_positions=ENDLESS_POSITIONS)
    return EngineConfig(model=str(path), device="cpu", kv_cache_tokens=65_536, max_running=32, max_restarts=2)


def replica(engine: AsyncEngine) -> ProcessReplica:
    one = engine._core._replica_set.records[0].replica
    assert isinstance(one, ProcessReplica)
    return one


async def test_killed_process_fails_open_requests_and_the_engine_restarts(config: EngineConfig) -> None:
    engine = AsyncEngine(config)
    await engine.start()
    try:
        expected = await engine.generate([1, 2, 3], SHORT).output()
        for role in ("worker", "manager"):
            streams = [engine.generate([1, 2, 3 + i], LONG) for i in range(40)]
            first = await anext(aiter(streams[0]))
            assert first.token_ids
            os.kill(replica(engine).children[role].pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):  # shorter than the step timeout
                results = await asyncio.gather(*(stream.output() for stream in streams), return_exceptions=True)
            assert all(isinstance(result, EngineDead) for result in results)
            assert role in str(results[0])
            await until(lambda: engine.health().state == "ready")
            again = await engine.generate([1, 2, 3], SHORT).output()
            assert again.outputs[0].token_ids == expected.outputs[0].token_ids
        assert engine.stats()["restarts"] == 2
        await anext(aiter(engine.generate([1, 2, 3], LONG)))
        await until(lambda: engine.stats()["steps_in_flight"] > 0)
        os.kill(replica(engine).children["worker"].pid, signal.SIGKILL)  # one death more than max_restarts
        await until(lambda: engine.health().state == "failed")
        assert not engine.health().ok
        gauges = ("requests_running", "sequences_running", "pages_used", "pages_cached", "steps_in_flight")
        assert [engine.stats()[name] for name in gauges] == [0] * len(gauges)
        with pytest.raises(EngineDead, match="failed"):
            engine.generate([1, 2, 3], SHORT)
    finally:
        await engine.close()


async def test_close_drains_open_requests_and_ends_all_processes(config: EngineConfig) -> None:
    engine = AsyncEngine(config)
    await engine.start()
    children = [psutil.Process(child.pid) for child in replica(engine).children.values()]
    drained = engine.generate([5, 6], SHORT)
    await engine.close(drain=30)
    assert len((await drained.output()).outputs[0].token_ids) == 4
    assert engine.health().state == "closed"
    assert not any(child.is_running() for child in children)


PARENT = """
import sys, time
from tok_core import Engine, EngineConfig
engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", kv_cache_tokens=4096, max_running=4))
print("ready", *(child.pid for child in engine._core._replica_set.records[0].replica.children.values()), flush=True)
time.sleep(600)
"""


def test_no_process_is_left_when_the_parent_is_killed(config: EngineConfig) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, config.model], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        word, *pids = parent.stdout.readline().split()
        assert word == "ready"
        children = [psutil.Process(int(pid)) for pid in pids]
        assert len(children) == 2
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_engine_start_error_names_the_bad_file_or_field(config: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        Engine(EngineConfig(model=str(tmp_path)))
    path = make_model("llama", tmp_path / "torn")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Engine(EngineConfig(model=str(path), device="cpu"))
    with pytest.raises(InvalidField, match="max_model_len is 100000; allowed: at most"):
        Engine(EngineConfig(model=config.model, device="cpu", max_model_len=100_000))
