"""A start that fails for lack of memory or by the death of a process raises an error and leaves no process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.engines import manager_of, random_prompts
from support.patience import PATIENCE, until, wait_until
from support.tiny_models import make_model
from tok_core import AsyncEngine, Engine, EngineConfig, EngineDead, EngineError, SamplingParams, TokError
from tok_core.replicas.replica import ProcessReplica
from tok_core.worker.runner import Runner

ABSURD = (1 << 40, 1 << 50, (1 << 63) - 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("memory") / "llama")


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def config(path: Path, **options: int) -> EngineConfig:
    settings = {"kv_cache_tokens": 4096, "max_running": 4, **options}
    return EngineConfig(model=str(path), device="cpu", **settings)  # type: ignore[arg-type]


async def started(engine: AsyncEngine) -> None:
    """Start the engine in time, or raise its error; close it in both cases."""
    try:
        async with asyncio.timeout(PATIENCE):
            await engine.start()
    finally:
        await engine.close()


@pytest.mark.parametrize("tokens", ABSURD)
async def test_kv_cache_larger_than_memory_is_refused(path: Path, tokens: int) -> None:
    with pytest.raises(TokError, match="kv_cache_tokens"):
        await started(AsyncEngine(config(path, kv_cache_tokens=tokens), in_process=True))


async def test_worker_process_refuses_a_kv_cache_larger_than_memory(path: Path) -> None:
    engine = AsyncEngine(config(path, kv_cache_tokens=ABSURD[0]))
    with pytest.raises(TokError, match="kv_cache_tokens"):
        await started(engine)
    assert engine.health().state == "closed"


LIMITED = """
import resource, sys
from tok_core import Engine, EngineConfig, EngineError
from tok_core.worker.startup import setup  # all that maps memory is loaded before the limit counts
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
model, tokens = sys.argv[1], int(sys.argv[2])
for room in (tokens, 4096):
    config = EngineConfig(model=model, device="cpu", kv_cache_tokens=room, max_running=4)
    try:
        with Engine(config, in_process=True) as one:
            print("served", one.info.num_pages * one.info.page_size, flush=True)
    except EngineError as error:
        print("refused", error, flush=True)
"""


def test_kv_cache_over_a_memory_limit_is_refused_and_a_smaller_one_served(path: Path) -> None:
    # 516 bytes a token: about 4 GiB, where 1 GiB more is allowed.
    command = [sys.executable, "-c", LIMITED, str(path), str(1 << 23)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # the limit includes the stacks of threads
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, timeout=PATIENCE, check=True)
    refused, served = done.stdout.splitlines()
    assert refused.startswith("refused")
    assert "kv_cache_tokens" in refused
    assert served == "served 4096"


def test_kv_cache_too_small_for_two_tokens_is_refused(path: Path) -> None:
    with pytest.raises(TokError, match="kv_cache_tokens is 1; allowed"):
        Engine(config(path, kv_cache_tokens=1, page_size=1), in_process=True)
    with Engine(config(path, kv_cache_tokens=2, page_size=1), in_process=True) as engine:
        (output,) = engine.generate(random_prompts((1,)), SamplingParams(max_tokens=1, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 1


def child(engine: AsyncEngine, role: str) -> int | None:
    """Return the process id of the engine's child with this role, or None before it is started."""
    replica = engine._core._replica_set.records[0].replica
    if not isinstance(replica, ProcessReplica) or role not in replica.children:
        return None
    return replica.children[role].pid


def has_loaded(pid: int | None, library: str) -> bool:
    return pid is not None and library in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(("role", "loaded"), [("worker", "python"), ("worker", "libtorch_cpu"), ("manager", "numpy")])
async def test_process_killed_during_start_fails_the_start(path: Path, role: str, loaded: str) -> None:
    engine = AsyncEngine(config(path))
    starting = asyncio.create_task(started(engine))
    await until(lambda: has_loaded(child(engine, role), loaded))
    pid = child(engine, role)
    assert pid is not None
    assert engine.health().state == "starting"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match=f"the {role} process was killed by signal 9"):
        await starting
    assert engine.stats()["restarts"] == 0


PARENT = """
import sys
from tok_core import Engine, EngineConfig
Engine(EngineConfig(model=sys.argv[1], device="cpu", kv_cache_tokens=4096, max_running=4))
"""


def test_no_process_is_left_when_the_parent_is_killed_during_start(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(path)]) as parent:
        started = psutil.Process(parent.pid)
        wait_until(lambda: len(started.children(recursive=True)) >= 2)
        children = started.children(recursive=True)
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


async def test_closing_an_engine_during_start_fails_the_start(path: Path) -> None:
    engine = AsyncEngine(config(path))
    starting = asyncio.create_task(started(engine))
    await until(lambda: child(engine, "manager") is not None)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await starting


def test_weights_are_freed_before_the_engine_reports_closed(path: Path) -> None:
    """A thread that still frees tensors while the interpreter exits would abort the process."""
    engine, freed = Engine(config(path), in_process=True), list[bool]()
    runner: Runner = manager_of(engine).ports._runner  # type: ignore[attr-defined]
    tensors = [weakref.ref(tensor) for tensor in (next(runner.model.parameters()), runner.state.columns.length)]
    del runner

    class Closed(threading.Event):
        def set(self) -> None:
            freed.extend(tensor() is None for tensor in tensors)
            super().set()

    engine._core._closed = Closed()
    engine.close()
    assert freed == [True, True]
