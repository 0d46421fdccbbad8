"""Restart of a replica while it serves: it drains its requests, others get new ones, and no request is lost."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest

from support.engines import assert_all_given_back, manager_of, random_prompts
from support.patience import PATIENCE, until, wait_until
from support.paused_engine import gated
from support.replicas import replica_of, simulated_core
from support.schedules import engine_info
from support.tiny_models import make_model
from tok_core import AsyncEngine, EngineConfig, InvalidField, SamplingParams
from tok_core.engine.core import EngineCore
from tok_core.engine.open_requests import OpenRequest
from tok_core.errors import EngineClosed, EngineDead, EngineError
from tok_core.grammar.checker import Checker, GrammarLimits, LocalExaminer
from tok_core.messages import array
from tok_core.sampling_params import Grammar

LONG = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("restart") / "tiny")


def config(path: Path, dp: int) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", dtype="float32", kv_cache_tokens=8192, max_running=16, dp=dp)


async def test_rolling_restart_under_load_keeps_every_answer_correct(tiny: Path) -> None:
    engine = AsyncEngine(config(tiny, 2), in_process=True)
    await engine.start()
    prompts = random_prompts((5, 9, 17, 33))
    right = [(await engine.generate(prompt, LONG).output()).outputs[0].token_ids for prompt in prompts]
    stop = asyncio.Event()
    done = 0

    async def ask(number: int) -> None:
        nonlocal done
        while not stop.is_set():
            found = await engine.generate(prompts[number], LONG, stream=number % 2 == 0).output()
            assert found.outputs[0].token_ids == right[number]
            done += 1

    asking = [asyncio.create_task(ask(number)) for number in range(len(prompts))]
    for number in (0, 1):
        before = done
        await engine.restart_replica(number)
        assert [one.state for one in engine.health().replicas] == ["ready", "ready"]
        await until(lambda before=before: done > before)  # type: ignore[misc]  # the engine keeps serving
    stop.set()
    await asyncio.gather(*asking)
    assert engine.stats()["restarts"] == 2
    assert engine.stats()["requests_finished"] >= done  # counters include the replicas before their restart
    assert engine.open_requests == 0
    for number in (0, 1):
        assert_all_given_back(manager_of(engine, number))
    await engine.close()


async def test_draining_only_replica_ends_its_requests_and_refuses_new_ones(tiny: Path) -> None:
    engine = AsyncEngine(config(tiny, 1), in_process=True)
    await engine.start()
    with gated(engine, steps=8):
        stream = engine.generate([1, 2, 3], LONG)
        await anext(stream.batches())
        restart = asyncio.create_task(engine.restart_replica(0))
        await until(lambda: engine.health().replicas[0].state == "draining")
        assert not engine.health().ok
        with pytest.raises(EngineDead, match="restart"):
            engine.generate([1], LONG)
        with pytest.raises(EngineError, match="replica 0 is draining already"):
            await engine.restart_replica(0)
    assert len((await stream.output()).outputs[0].token_ids) == 100
    await restart
    assert (await engine.generate([1], LONG).output()).outputs[0].finish_reason == "length"
    await engine.close()


async def test_requests_left_after_the_drain_time_fail_and_the_engine_restarts(tiny: Path) -> None:
    engine = AsyncEngine(config(tiny, 1), in_process=True)
    await engine.start()
    stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=900, ignore_eos=True, n=16))
    await anext(stream.batches())
    await engine.restart_replica(0, drain=0)
    with pytest.raises(EngineDead, match="the replica was restarted"):
        await stream.output()
    assert engine.health().ok
    await engine.close()


async def test_restart_refuses_an_unknown_replica_number(tiny: Path) -> None:
    engine = AsyncEngine(config(tiny, 1), in_process=True)
    for number in (-1, 1):
        with pytest.raises(InvalidField, match=f"replica is {number}; allowed: integers from 0 to 0"):
            await engine.restart_replica(number)
    await engine.close()


@pytest.mark.parametrize("drain", ["10", None, float("nan"), -1])
async def test_restart_refuses_an_invalid_drain_time_before_it_drains(tiny: Path, drain: Any) -> None:
    engine = AsyncEngine(config(tiny, 1), in_process=True)
    await engine.start()
    with pytest.raises(InvalidField, match=r"drain is .*; allowed: seconds from 0"):
        await engine.restart_replica(0, drain=drain)
    assert engine.health().ok
    await engine.close()


def restarting(core: EngineCore, number: int) -> tuple[threading.Thread, list[Exception]]:
    """Start a restart in a thread, and return the thread and the errors that it raises."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            core.restart_replica(number, PATIENCE)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def two_replicas() -> EngineCore:
    core = simulated_core(engine_info(), dp=2)
    for number in (0, 1):
        replica_of(core, number).be_ready()
    return core


def test_replica_that_dies_while_draining_restarts_once() -> None:
    core = two_replicas()
    request = core.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), None, lambda _: None, stream=False)
    (part,) = request.parts
    before = replica_of(core, part.replica)
    thread, errors = restarting(core, part.replica)
    wait_until(lambda: core.health().replicas[part.replica].state == "draining")
    before.die("it fell over")
    wait_until(lambda: core._replica_set.records[part.replica].replica not in (None, before))
    replica_of(core, part.replica).be_ready()
    thread.join(PATIENCE)
    assert not errors
    assert core.stats()["restarts"] == 1
    for number in (0, 1):
        replica_of(core, number).settle()
    assert request.ended()
    assert request.error is None  # the other replica has computed it


def test_other_replica_gets_every_request_during_a_restart() -> None:
    core = two_replicas()
    thread, errors = restarting(core, 0)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    wait_until(lambda: core.health().replicas[0].state != "ready")
    requests = [core.submit([7, 8, 9], params, None, lambda _: None, stream=False) for _ in range(8)]
    assert {part.replica for request in requests for part in request.parts} == {1}
    wait_until(lambda: core.health().replicas[0].state == "restarting" and replica_started(core, 0))
    assert core.health().ok
    replica_of(core, 0).be_ready()
    thread.join(PATIENCE)
    assert not errors
    replica_of(core, 1).settle()
    assert all(request.ended() for request in requests)


def replica_started(core: EngineCore, number: int) -> bool:
    return core._replica_set.records[number].replica is not None


def test_closing_the_engine_ends_a_restart_with_an_error() -> None:
    core = two_replicas()
    thread, errors = restarting(core, 0)
    wait_until(lambda: core.health().replicas[0].state == "restarting" and replica_started(core, 0))
    core.close()
    thread.join(PATIENCE)
    assert [type(error).__name__ for error in errors] == ["EngineClosed"]


GUIDED = SamplingParams(max_tokens=4, seed=0, grammar=Grammar(kind="regex", value="[a-h]{3}"))


class Undecided(Checker):
    """Checker whose verdict the test sets."""

    def __init__(self) -> None:
        super().__init__(LocalExaminer(GrammarLimits("", 1, (0,))))
        self.answer: Future[str] = Future()

    def begin(self, grammar: Grammar, most: int | None = None, tenant: str = "") -> Future[str]:
        return self.answer


def one_replica_and_a_grammar_being_checked(monkeypatch: pytest.MonkeyPatch) -> tuple[EngineCore, OpenRequest]:
    core = simulated_core(engine_info(), dp=1)
    replica_of(core, 0).be_ready()
    monkeypatch.setattr(core, "check", lambda ids, params: array(ids))  # the simulated model has no tokenizer
    core._checker = Undecided()
    return core, core.submit([1, 2, 3], GUIDED, None, lambda _: None, stream=True)


def checked(core: EngineCore) -> Future[str]:
    assert isinstance(core._checker, Undecided)
    return core._checker.answer


def test_request_with_grammar_checked_during_a_restart_runs_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, request = one_replica_and_a_grammar_being_checked(monkeypatch)
    thread, errors = restarting(core, 0)
    wait_until(lambda: core.health().replicas[0].state == "restarting" and replica_started(core, 0))
    checked(core).set_result("")
    assert not request.ended()
    assert not request.parts
    replica_of(core, 0).be_ready()
    thread.join(PATIENCE)
    assert not errors
    assert [part.replica for part in request.parts] == [0]
    assert not core._dispatcher.held
    core.close()
    assert isinstance(request.error, EngineClosed)


@pytest.mark.parametrize("failure", [OSError("no memory"), CancelledError()])
def test_failed_grammar_check_fails_its_request(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    core, request = one_replica_and_a_grammar_being_checked(monkeypatch)
    checked(core).set_exception(failure)
    assert isinstance(request.error, EngineError)
    assert core.open_requests == 0
    core.close()


def test_request_waiting_for_a_restart_fails_with_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tok_core.replicas.replica_record.FIRST_PAUSE_SECONDS", 0.0)
    core, request = one_replica_and_a_grammar_being_checked(monkeypatch)
    core._replica_set.records[0].drain()
    checked(core).set_result("")
    assert not request.ended()
    for _ in range(20):
        if replica_started(core, 0):
            replica_of(core, 0).die("it was told to")
    assert core.health().state == "failed"
    assert isinstance(request.error, EngineDead)
    core.close()


def test_closing_the_engine_waits_for_a_draining_replica() -> None:
    core = simulated_core(engine_info(), dp=1)
    replica_of(core, 0).be_ready()
    request = core.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), None, lambda _: None, stream=True)
    thread, _ = restarting(core, 0)
    wait_until(lambda: core.health().replicas[0].state == "draining")
    closing = threading.Thread(target=core.close, args=(PATIENCE,))
    closing.start()
    replica_of(core, 0).settle()
    for one in (closing, thread):
        one.join(PATIENCE)
        assert not one.is_alive()
    assert request.error is None
    assert request.ended()


def test_request_failed_by_the_manager_does_not_fail_others() -> None:
    core = two_replicas()
    told: list[OpenRequest] = []
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [core.submit([1, 2, 3], params, None, told.extend, stream=False) for _ in range(2)]
    (part,) = requests[0].parts
    replica = replica_of(core, part.replica)
    # Drop the message, as if the manager had received it.
    replica.ports.inbox = [one for one in replica.ports.inbox if getattr(one, "rid", None) != requests[0].rid]
    replica.manager.faults.fail(requests[0].rid, "broken")
    for number in (0, 1):
        replica_of(core, number).settle()
    assert str(requests[0].error) == "broken"
    assert requests[1].error is None
    assert told.count(requests[0]) == 1
    assert all(request.ended() for request in requests)
    core.close()


def test_aborted_embedding_ends_with_an_error() -> None:
    core = two_replicas()
    told: list[OpenRequest] = []
    request = core.embed([1, 2], SamplingParams(max_tokens=0, seed=0), "mean", told.extend, array([1, 2]))
    core.abort(request.request_id)
    assert isinstance(request.error, EngineError)
    assert told == [request]
    assert core.open_requests == 0
    core.close()
