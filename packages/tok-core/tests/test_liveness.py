"""Liveness detects and replaces hung processes; slow processes and clock jumps trigger nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.patience import PATIENCE, until
from support.paused_engine import ENDLESS, ENDLESS_POSITIONS
from support.replicas import replica_of, simulated_core
from support.schedules import engine_info
from support.tiny_models import make_model
from tok_core import AsyncEngine, Engine, EngineConfig, EngineDead, EngineError, SamplingParams
from tok_core.engine.open_requests import OpenRequest
from tok_core.messages import Beat, Silence
from tok_core.replicas.liveness import Liveness
from tok_core.replicas.replica import ProcessReplica
from tok_core.runtime.heartbeat import Heartbeat

pytestmark = pytest.mark.usefixtures("forked_children")

LONG = SamplingParams(max_tokens=ENDLESS, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CONFIG = EngineConfig(model="m", step_timeout=60, start_timeout=200)


class Replica:
    """Heartbeats of a manager and a worker, on a clock that the test advances."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.now = 1000.0
        self.turns = {"worker": 0, "manager": 0}
        self.liveness = Liveness(self.turns, config, lambda: self.now)

    def run(self, seconds: int, *, beating: str = "worker manager", turning: str = "worker manager") -> None:
        """Each second, check liveness; then roles in `beating` send a beat, and those also in `turning` have turned."""
        for _ in range(seconds):
            self.now += 1
            self.liveness.look()
            for role in beating.split():
                self.turns[role] += role in turning
                self.liveness.record_beat(Beat(role, self.turns[role]))

    @property
    def found(self) -> tuple[str, str]:
        return self.liveness.silent, self.liveness.hung


@pytest.fixture
def replica() -> Replica:
    found = Replica()
    found.run(1)
    found.liveness.serve()
    return found


def test_liveness_reports_nothing_while_both_loops_turn(replica: Replica) -> None:
    replica.run(10_000)
    assert replica.found == ("", "")


@pytest.mark.parametrize(("role", "other"), [("manager", "worker"), ("worker", "manager")])
def test_stopped_process_is_silent_soon_and_hung_after_step_timeout(replica: Replica, role: str, other: str) -> None:
    replica.run(100)
    replica.run(10, beating=other)
    assert replica.found == ("", "")
    replica.run(1, beating=other)
    assert replica.found == (f"no sign of life from the {role} process", "")
    replica.run(49, beating=other)
    assert not replica.liveness.hung
    replica.run(1, beating=other)
    assert replica.liveness.hung == f"the {role} process hung for 60 s and was killed"


def test_process_that_resumes_before_step_timeout_is_healthy_again(replica: Replica) -> None:
    replica.run(59, beating="worker")
    assert replica.liveness.silent
    replica.run(1)
    assert replica.found == ("", "")


def test_worker_in_a_long_step_is_not_silent_but_hung_after_step_timeout(replica: Replica) -> None:
    replica.run(60, turning="manager")
    assert replica.found == ("", "")
    replica.run(1, turning="manager")
    assert replica.liveness.hung == "the worker process hung for 60 s and was killed"


def test_manager_with_a_hung_loop_is_detected_despite_its_heartbeats(replica: Replica) -> None:
    replica.run(11, turning="worker")
    assert replica.liveness.silent == "no sign of life from the manager process"
    replica.run(50, turning="worker")
    assert replica.liveness.hung


def test_liveness_names_the_stopped_process_not_those_waiting_for_it(replica: Replica) -> None:
    replica.run(61, beating="manager", turning="")
    assert replica.liveness.hung == "the worker process hung for 60 s and was killed"


def test_start_may_take_any_time_while_one_process_makes_progress() -> None:
    replica = Replica()
    replica.run(10_000, turning="worker")  # while the manager waits
    assert replica.found == ("", "")
    replica.run(200, beating="manager", turning="")
    assert not replica.liveness.hung
    replica.run(1, beating="manager", turning="")
    expected = "the start made no progress for 200 s, with no sign of life from the worker process"
    assert replica.liveness.hung == expected


def test_start_of_live_processes_without_progress_times_out() -> None:
    replica = Replica()
    replica.run(1)
    replica.run(200, turning="")
    assert replica.found == ("", "")
    replica.run(1, turning="")
    assert replica.liveness.hung == "the start made no progress for 200 s"


def test_heartbeat_counts_beats_as_progress_only_in_coarse_sections() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.beat() == heartbeat.beat()
    with heartbeat.coarse():
        assert heartbeat.beat() < heartbeat.beat()
    assert heartbeat.beat() == heartbeat.beat()
    before = heartbeat.beat()
    heartbeat.turned()
    assert heartbeat.beat() > before


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_clock_jumps_make_no_process_silent_or_hung(replica: Replica, jump: float) -> None:
    for _ in range(3):
        replica.now += jump
        replica.liveness.look()
        assert replica.found == ("", "")
        replica.run(1)


def test_unresponsive_replica_gets_no_requests_until_it_responds_again() -> None:
    core = simulated_core(engine_info(), dp=2)
    for number in (0, 1):
        replica_of(core, number).be_ready()
    replica_of(core, 0)._report(Silence("no sign of life from the manager process"))
    health = core.health()
    assert health.ok
    assert [one.state for one in health.replicas] == ["unresponsive", "ready"]
    assert "no sign of life from the manager process" in health.detail

    def ask() -> OpenRequest:
        return core.submit([7, 8, 9], SHORT, None, lambda _: None, stream=False)

    requests = [ask() for _ in range(8)]
    assert {part.replica for request in requests for part in request.parts} == {1}
    replica_of(core, 1)._report(Silence("no sign of life from the worker process"))
    assert core.health().state == "unresponsive"
    with pytest.raises(EngineDead, match="unresponsive"):
        ask()
    for number in (0, 1):
        replica_of(core, number)._report(Silence(""))
    assert core.health() == msgspec.structs.replace(health, detail="", replicas=core.health().replicas)
    assert {part.replica for part in ask().parts} == {0}
    for number in (0, 1):
        replica_of(core, number).settle()
    core.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("liveness") / "llama", max_positions=ENDLESS_POSITIONS)


def process_config(path: Path, **options: float) -> EngineConfig:
    settings = {
        "kv_cache_tokens": ENDLESS_POSITIONS,
        "max_running": 32,
        "max_restarts": 10,
        "step_timeout": 6.0,
        **options,
    }
    return EngineConfig(model=str(path), device="cpu", **settings)  # type: ignore[arg-type]


def child(core: object, role: str) -> int | None:
    """Return the process id of a child process of the only replica, if it runs."""
    replica = core._replica_set.records[0].replica  # type: ignore[attr-defined]
    if not isinstance(replica, ProcessReplica) or role not in replica.children:
        return None
    return replica.children[role].pid


async def test_stopped_process_fails_open_requests_and_is_replaced(path: Path) -> None:
    engine = AsyncEngine(process_config(path))
    await engine.start()
    try:
        expected = await engine.generate([1, 2, 3], SHORT).output()
        for role in ("manager", "worker"):
            streams = [engine.generate([1, 2, 3 + i], LONG) for i in range(4)]
            await anext(aiter(streams[0]))
            pid = child(engine._core, role)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            reading = asyncio.gather(*(stream.output() for stream in streams), return_exceptions=True)
            await until(lambda: engine.health().state == "unresponsive")
            assert not engine.health().ok
            with pytest.raises(EngineDead, match="unresponsive"):
                engine.generate([1], SHORT)
            results = await asyncio.wait_for(reading, PATIENCE)
            assert all(isinstance(result, EngineDead) for result in results)
            assert "hung" in str(results[0]) or "stuck" in str(results[0])
            await until(lambda: engine.health().ok)
            again = await engine.generate([1, 2, 3], SHORT).output()
            assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    finally:
        await engine.close()


async def test_an_unresponsive_replica_is_restarted_without_a_drain(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tok_core.replicas.liveness.MAX_SILENT_SECONDS", 4.0)
    engine = AsyncEngine(process_config(path, step_timeout=600.0))  # its detection as hung would take ten minutes
    await engine.start()
    try:
        stream = engine.generate([1, 2, 3], LONG)
        await anext(aiter(stream))
        pid = child(engine._core, "manager")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: engine.health().state == "unresponsive")
        await engine.restart_replica(0, drain=0)
        with pytest.raises(EngineDead, match="restarted"):
            await stream.output()
        assert len((await engine.generate([1, 2, 3], SHORT).output()).outputs[0].token_ids) == 4
    finally:
        await engine.close()


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Stop every worker as soon as it is spawned; yield the process ids."""
    spawn, stopped = ProcessReplica._spawn, list[int]()

    def spawn_and_stop(self: ProcessReplica, role: str, place: object) -> None:
        spawn(self, role, place)  # type: ignore[arg-type]
        if role == "worker":
            stopped.append(self.children[role].pid)
            os.kill(stopped[-1], signal.SIGSTOP)

    monkeypatch.setattr(ProcessReplica, "_spawn", spawn_and_stop)
    yield stopped
    for pid in stopped:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_worker_stopped_while_loading_fails_the_start(path: Path, stopping: list[int]) -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            Engine(process_config(path, start_timeout=3.0))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(200)
    assert stopping
    assert [type(error) for error in errors] == [EngineDead]
    assert isinstance(errors[0], EngineError)
    assert "the start made no progress for 3 s" in str(errors[0])
