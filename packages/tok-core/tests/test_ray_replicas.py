"""Ray replicas on two nodes give one process's tokens, recover from deaths, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from support.engines import cpu_engine, random_prompts
from support.patience import until
from support.paused_engine import ENDLESS_POSITIONS
from support.ray_nodes import two_nodes
from support.tiny_models import make_model
from tok_core import (
    AsyncEngine,
    Engine,
    EngineConfig,
    EngineDead,
    EngineError,
    InvalidField,
    ModelError,
    SamplingParams,
)
from tok_core.errors import from_wire, to_wire
from tok_core.messages import Failed, ToEngine
from tok_core.replicas.ray_actors import RayActors
from tok_core.replicas.ray_cluster import join_cluster, remove_placement
from tok_core.replicas.ray_member import NICENESS, ActorLocation, reset_niceness
from tok_core.replicas.ray_replica import RayReplica

PROMPTS = random_prompts((3, 17, 40, 65))
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=ENDLESS_POSITIONS // 10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("ray") / "qwen2", max_positions=ENDLESS_POSITIONS)


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[int]]:
    with cpu_engine(path) as engine:
        return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with two_nodes() as address:
        yield address


def config(path: Path, cluster: str, **options: int) -> EngineConfig:
    options |= {"kv_cache_tokens": ENDLESS_POSITIONS, "max_running": 32}
    return EngineConfig(model=str(path), ray=cluster, device="cpu", **options)  # type: ignore[arg-type]


def nothing_is_left(pids: list[int]) -> bool:
    """Return whether the processes and their placement groups are gone and both CPUs are free."""
    import ray  # not above: `support.ray_nodes` has to be imported first
    from ray.util.placement_group import placement_group_table

    groups = {group["state"] for group in placement_group_table().values()}
    return not any(map(psutil.pid_exists, pids)) and groups <= {"REMOVED"} and ray.available_resources().get("CPU") == 2


def actors_of(engine: AsyncEngine) -> list[RayActors]:
    replicas = [life.replica for life in engine._core._replica_set.records]
    return [replica.actors for replica in replicas if isinstance(replica, RayReplica)]


def test_address_without_a_ray_cluster_is_an_error_at_once(path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"no Ray cluster at {address} .*refused"):
            Engine(config(path, address))


async def test_engine_of_replicas_on_two_ray_nodes_survives_a_worker_death(
    path: Path, alone: list[list[int]], cluster: str
) -> None:
    engine = AsyncEngine(config(path, cluster, dp=2))
    await engine.start()
    try:
        actors = actors_of(engine)
        assert len({one.nodes["worker"] for one in actors}) == 2
        outputs = await asyncio.gather(*(engine.generate(prompt, GREEDY).output() for prompt in PROMPTS))
        assert [output.outputs[0].token_ids for output in outputs] == alone
        streams = [engine.generate([1, 2, 3 + i], LONG) for i in range(16)]  # all of them fit both caches at once
        await asyncio.gather(*(anext(aiter(stream)) for stream in streams))
        os.kill(actors[0].location["worker"].pid, signal.SIGKILL)
        outputs_to_come = [asyncio.create_task(stream.output()) for stream in streams]
        await until(lambda: engine.stats()["replicas_ready"] == 1)
        await until(lambda: engine.stats()["replicas_ready"] == 2)
        for output in outputs_to_come:
            output.cancel()  # those of the other replica, which may still run
        results = await asyncio.gather(*outputs_to_come, return_exceptions=True)
        failed = [result for result in results if isinstance(result, EngineDead)]
        assert 0 < len(failed) < len(streams)
        assert re.search(r"the worker process \d+ on host \S+ died", str(failed[0]))
        pids = [where.pid for one in actors_of(engine) for where in one.location.values()]
        assert len(pids) == 4
        outputs = await asyncio.gather(*(engine.generate(prompt, GREEDY).output() for prompt in PROMPTS))
        assert [output.outputs[0].token_ids for output in outputs] == alone
    finally:
        await engine.close()
    await until(lambda: nothing_is_left(pids))


async def test_hung_process_on_a_ray_node_is_killed_and_replaced(path: Path, cluster: str) -> None:
    engine = AsyncEngine(config(path, cluster, step_timeout=8))
    await engine.start()
    try:
        for role in ("worker", "manager"):
            stream = engine.generate([1, 2, 3], LONG)
            await anext(aiter(stream))
            pids = [where.pid for where in actors_of(engine)[0].location.values()]
            os.kill(actors_of(engine)[0].location[role].pid, signal.SIGSTOP)
            with pytest.raises(EngineDead, match=r"hung|stuck"):
                await asyncio.wait_for(stream.output(), 200)
            await until(lambda: engine.health().ok, 200)
            assert len((await engine.generate([1, 2, 3], GREEDY).output()).outputs[0].token_ids) == 24
            await until(lambda pids=pids: not any(map(psutil.pid_exists, pids)))  # type: ignore[misc]
    finally:
        await engine.close()


ENGINE = """
import json, sys, time
from tok_core import Engine, EngineConfig, SamplingParams
model, ray, prompts = json.loads(sys.argv[1])
engine = Engine(EngineConfig(model=model, ray=ray, device="cpu", tp=2, kv_cache_tokens=4096, max_running=8))
outputs = engine.generate(prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
actors = engine._core._replica_set.records[0].replica.actors
pids = [where.pid for where in actors.location.values()]
print(json.dumps([[output.outputs[0].token_ids for output in outputs], actors.nodes, pids]), flush=True)
time.sleep(600)
"""


async def test_tp_ranks_on_two_ray_nodes_match_and_end_with_the_engine(
    path: Path, alone: list[list[int]], cluster: str
) -> None:
    command = [sys.executable, "-c", ENGINE, json.dumps([str(path), cluster, PROMPTS])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        tokens, nodes, pids = json.loads(parent.stdout.readline())
        parent.kill()
    assert tokens == alone
    assert len(set(nodes.values())) == len(nodes) == 2
    assert len(pids) == 3
    join_cluster(config(path, cluster))
    await until(lambda: nothing_is_left(pids))


async def test_ray_start_names_a_host_without_the_model_and_can_be_closed(path: Path, cluster: str) -> None:
    settings = config(path, cluster)
    join_cluster(settings)
    reports: list[ToEngine] = []
    deaths: list[str] = []

    def died(replica: object, reason: str, *, by_request: bool = False) -> None:
        deaths.append(reason)

    missing = RayReplica(settings, 0, reports.append, died, model="/not/here")
    missing.start()
    given_up = RayReplica(settings, 1, reports.append, died, model=str(path))
    given_up.start()
    given_up.close()
    await until(lambda: bool(deaths))
    assert len(deaths) == len(reports) == 1
    assert isinstance(reports[0], Failed)
    with pytest.raises(ModelError, match=r"'/not/here': is no directory.*\(on host [\d.]+; each host needs"):
        raise from_wire(reports[0].kind, reports[0].arguments)
    await until(lambda: nothing_is_left([]))


async def test_ray_start_closed_at_any_moment_leaves_nothing_behind(path: Path, cluster: str) -> None:
    settings = config(path, cluster, tp=2)
    join_cluster(settings)
    for milliseconds in (0, 1, 2, 4, 8, 100):
        given_up = RayReplica(settings, 0, not_to_be_called, not_to_be_called, model=str(path))
        given_up.start()
        await asyncio.sleep(milliseconds / 1e3)
        await asyncio.to_thread(given_up.close)
        await until(lambda: nothing_is_left([]))


async def test_placement_group_removed_during_creation_is_freed(path: Path, cluster: str) -> None:
    join_cluster(config(path, cluster))
    from ray.util.placement_group import placement_group

    for i in range(30):  # with immediate removal, every twentieth would stay reserved for good
        group = placement_group([{"CPU": 1.0}] * (1 + i % 2))
        end = time.perf_counter() + (i % 5) * 5e-4
        while time.perf_counter() < end:
            pass
        remove_placement(group)
        await until(lambda: nothing_is_left([]))


def not_to_be_called(*told: object, **options: object) -> None:
    raise AssertionError((told, options))


def test_ray_actors_that_end_together_report_the_root_cause(path: Path, cluster: str) -> None:
    settings = config(path, cluster)
    join_cluster(settings)
    import ray

    def ended(**runs: object) -> tuple[str, Failed | None] | None:
        actors = RayActors(settings, lambda: False)
        actors.location = {role: ActorLocation("10.0.0.1", 1, (), ()) for role in runs}
        actors._runs = {run: role for role, run in runs.items()}
        ray.wait(list(runs.values()), num_returns=len(runs))
        return actors.ended()

    died = ray.remote(num_cpus=0, max_retries=0)(lambda: os._exit(1)).remote()
    missed, misled = (ray.put(to_wire(one)) for one in (RuntimeError("Connection reset"), ModelError("no such tensor")))
    told = ended(first=missed, second=died)
    assert told == ("the second process 1 on host 10.0.0.1 died", None)
    told = ended(first=missed, second=died, third=misled)
    assert told is not None
    assert told[0] == "the third process 1 on host 10.0.0.1 ended"
    assert told[1] == Failed("ModelError", ("no such tensor",))


@pytest.mark.parametrize("asked", [None, "15"])
def test_ray_member_resets_its_niceness_unless_the_user_set_one(
    asked: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(NICENESS)
    if asked is not None:
        monkeypatch.setenv(NICENESS, asked)

    def niceness() -> int:
        os.setpriority(os.PRIO_PROCESS, 0, 15)  # of this thread alone
        reset_niceness()
        return os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(niceness).result()
    assert found == (0 if asked is None and may_be_less_nice() else 15)
    assert (f"start Ray's nodes with {NICENESS}=0" in caplog.text) == (asked is None and found == 15)


def may_be_less_nice() -> bool:
    code = "import os; os.nice(1); os.nice(-1)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_engine_that_exceeds_the_ray_cluster_is_rejected_at_once(path: Path, cluster: str) -> None:
    with pytest.raises(InvalidField, match=r"tp is 3; allowed: dp × pp × tp at most 2, the CPUs of the Ray cluster"):
        Engine(config(path, cluster, tp=3))
    with pytest.raises(InvalidField, match=r"device is 'cuda'; allowed: cpu"):
        Engine(EngineConfig(model=str(path), ray=cluster, device="cuda"))
    with pytest.raises(InvalidField, match="this process has joined"):
        Engine(config(path, "127.0.0.1:1"))


def test_ray_worker_sees_its_replicas_gpus_on_its_node_and_uses_its_own(path: Path) -> None:
    actors = RayActors(EngineConfig(model=str(path), ray="auto", tp=2, pp=2), lambda: False)
    given = {"worker 0": ("a", "3"), "worker 1": ("a", "1"), "worker 2": ("b", "3"), "worker 3": ("b", "0")}
    for role, (node, gpu) in given.items():
        actors.nodes[role] = node
        actors.location[role] = ActorLocation(f"10.0.0.{node}", 1, (gpu,), (f"tcp://{role}",))
    actors.location["manager"] = ActorLocation("10.0.0.a", 1, (), ("tcp://requests", "tcp://outputs"))
    launches = [actors.launch(role, None, 0, "tcp://reports") for role in actors.location]
    assert [actors.visible(role) for role in given] == [["3", "1"], ["3", "1"], ["3", "0"], ["3", "0"]]
    assert [launch.device for launch in launches] == [0, 1, 0, 1, None]
    assert launches[0].steps == ["tcp://worker 0", "tcp://worker 1", "tcp://worker 2", "tcp://worker 3"]
    assert (launches[0].requests, launches[0].outputs) == ("tcp://requests", "tcp://outputs")


def test_invalid_ray_options_and_missing_ray_are_rejected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("ray://head:10001", "head", "", "head:port", 6379):
        with pytest.raises(InvalidField, match="HOST:PORT"):
            EngineConfig(model=str(path), ray=address)  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=r"trace is 'steps\.json'; allowed: only without ray"):
        EngineConfig(model=str(path), ray="auto", trace="steps.json")
    with pytest.raises(InvalidField, match="none within one process"):
        Engine(EngineConfig(model=str(path), ray="auto"), in_process=True)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidField, match=r"pip install 'tok-server\[ray\]'"):
        Engine(EngineConfig(model=str(path), ray="auto"))
