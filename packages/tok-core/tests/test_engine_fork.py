"""A forked process does not affect the engine, and an engine dropped without `close` leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from support.tiny_models import make_model

DEADLINE = 240  # seconds, against hanging


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("llama", tmp_path_factory.mktemp("fork") / "llama"))


START = """
import asyncio, gc, os, sys, time
import psutil
from tok_core import AsyncEngine, Engine, EngineClosed, EngineConfig, SamplingParams
from tok_core.sampling_params import Grammar

config = EngineConfig(model=sys.argv[1], device="cpu", kv_cache_tokens=4096, max_running=4)
short = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

def fork(work):
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(7)
    return pid

def children_of(engine):
    return [psutil.Process(child.pid) for child in engine._core._replica_set.records[0].replica.children.values()]

def refused(call):
    try:
        call()
    except EngineClosed as error:
        assert "forked" in str(error), error
        return
    raise AssertionError("a forked process may use the engine")
"""

FORKS = (
    START
    + """
engine = Engine(config)
wanted = engine.generate([[1, 2, 3]], short)[0].outputs[0].token_ids

def use():
    refused(lambda: engine.generate([[1, 2, 3]], short))
    refused(lambda: engine.embed([[1, 2, 3]]))
    refused(engine.stats)
    assert engine.health().state == "closed", engine.health()
    with engine:
        pass
    engine.close()

for work in (lambda: None, use, lambda: os.close(0)):
    assert os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1]) == 7

# A fork within a call, while other threads hold locks, and one whose copy of the engine is collected.
with engine._core._lock:
    pid = fork(use)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
pid = os.fork()
if pid == 0:
    del engine
    gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert engine.generate([[1, 2, 3]], short)[0].outputs[0].token_ids == wanted
assert engine.stats()["restarts"] == 0
print("served")
"""
)

DROPPED = (
    START
    + """
engine = Engine(config)
engine.generate([[1, 2, 3]], short)
children = children_of(engine)
del engine

async def serve():
    engine = AsyncEngine(config)
    await engine.start()
    await engine.generate([1, 2, 3], short).output()
    return children_of(engine)

children += asyncio.run(serve())
gc.collect()
_, alive = psutil.wait_procs(children, timeout=200)
assert len(children) == 4 and not alive, alive
Engine(config, in_process=True)
print("ended")
"""
)

PARENT = (
    START
    + """
engine = Engine(config)
guided = SamplingParams(max_tokens=4, grammar=Grammar(kind="regex", value="[ab]{3}"))
engine.generate([[1, 2, 3]], guided)  # starts processes for grammars, too
children = psutil.Process().children()
assert len(children) > len(children_of(engine))
forked = fork(lambda: time.sleep(600))
print(forked, *(child.pid for child in children), flush=True)
time.sleep(600)
"""
)


@pytest.mark.parametrize(("script", "last"), [(FORKS, "served"), (DROPPED, "ended")], ids=["forked", "dropped"])
def test_engine_serves_after_forks_and_ends_when_dropped_without_close(script: str, last: str, path: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, [last]), done.stderr
    assert "Traceback" not in done.stderr


def test_a_forked_process_does_not_keep_the_engines_processes_alive(path: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        forked, *pids = map(int, parent.stdout.readline().split())
        try:
            children = [psutil.Process(pid) for pid in pids]
            assert len(children) > 2
            parent.kill()
            _, alive = psutil.wait_procs(children, timeout=DEADLINE)
            assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
        finally:
            os.kill(forked, signal.SIGKILL)
