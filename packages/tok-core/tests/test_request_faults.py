"""A fault anywhere in the path of a request fails only that request: others get every token, no replica ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from support.engines import assert_all_given_back, manager_of
from support.patience import until, wait_until
from support.replicas import replica_of, simulated_core
from support.schedules import engine_info
from support.tiny_models import make_model
from tok_core import AsyncEngine, EngineConfig, EngineDead, EngineError, SamplingParams
from tok_core.engine.embedding import EmbedRequest
from tok_core.engine.generation_requests import StreamedRequest, UnstreamedRequest
from tok_core.engine.open_requests import OpenRequest, PromptLogprobs
from tok_core.engine.request_stream import RequestStream
from tok_core.manager.admission.sequence_starter import SequenceStarter
from tok_core.manager.ends import EndFinder
from tok_core.manager.intake import RequestIntake
from tok_core.manager.kv_cache.paging import Paging
from tok_core.manager.output_processor import OutputProcessor
from tok_core.manager.prompt_outputs import PromptOutputProcessor
from tok_core.manager.scheduling.scheduler import Scheduler
from tok_core.manager.stops import StopSets
from tok_core.messages import Submit, ToManager
from tok_core.replicas.replica import ProcessReplica
from tok_core.text.detokenise import Detokeniser
from tok_core.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("forked_children")

GUILTY = [77, 77, 77]
CURRENT_SEQUENCE = (5,)  # a stop token that only guilty requests have
INNOCENT = [[1, 2, 3], [4, 5], list(range(40))]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=800, ignore_eos=True)


class Fault(Exception):
    """The error that a test injects."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("request-faults") / "llama")


def config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", dtype="float32", kv_cache_tokens=8192, max_running=16)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[AsyncEngine]:
    found = AsyncEngine(config(path), in_process=True)
    asyncio.run(found.start())
    yield found
    asyncio.run(found.close())


def guilty_request(one: Any) -> bool:
    return list(one.prompt) == GUILTY


def guilty_row(table: Any, slots: Any) -> bool:
    requests = [table.requests[slot] for slot in slots.tolist()]
    return any(request is not None and guilty_request(request) for request in requests)


PLACES: dict[str, tuple[type | ModuleType, str, Callable[..., bool]]] = {
    "taken in": (RequestIntake, "submit", lambda self, message: guilty_request(message)),
    "queued": (Scheduler, "submit", lambda self, request: guilty_request(request)),
    "weighed": (SequenceStarter, "costs", lambda self, pending, *rest: guilty_request(pending.request)),
    "started": (SequenceStarter, "lead", lambda self, pending, *rest: guilty_request(pending.request)),
    "given pages": (Paging, "publish", lambda self, slot: guilty_row(self.table, np.array([slot]))),
    "given its stop strings": (StopSets, "acquire", lambda self, params: params.stop_token_ids == CURRENT_SEQUENCE),
    "looked at for its end": (EndFinder, "_find", lambda self, slots, *rest: guilty_row(self._table, slots)),
    "told of its tokens": (StreamedRequest, "advance", lambda self, *rest: guilty_request(self)),
    "told of its ends": (UnstreamedRequest, "advance", lambda self, *rest: guilty_request(self)),
}


def break_at(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, guilty = PLACES[place]
    right = getattr(owner, name)

    def wrong(*arguments: Any) -> Any:
        if guilty(*arguments):
            raise Fault(f"it broke while it was {place}")
        return right(*arguments)

    monkeypatch.setattr(owner, name, wrong)


async def assert_it_fails_alone(
    engine: AsyncEngine, guilty: RequestStream, innocent: list[RequestStream], wanted: list[list[int]], match: str
) -> None:
    results = await asyncio.gather(*(one.output() for one in (guilty, *innocent)), return_exceptions=True)
    assert isinstance(results[0], EngineError)
    assert match in str(results[0])
    assert [one.outputs[0].token_ids for one in results[1:] if not isinstance(one, BaseException)] == wanted
    assert engine.health().ok
    assert engine.open_requests == 0
    assert engine.stats()["restarts"] == 0
    await asyncio.to_thread(assert_all_given_back, manager_of(engine))


@pytest.mark.parametrize(
    ("place", "stream"),
    [
        *[(place, stream) for place in PLACES if not place.startswith("told") for stream in (True, False)],
        ("told of its tokens", True),
        ("told of its ends", False),
    ],
)
async def test_a_fault_fails_its_request_and_no_other(
    engine: AsyncEngine, place: str, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [(await engine.generate(prompt, PARAMS).output()).outputs[0].token_ids for prompt in INNOCENT]
    break_at(place, monkeypatch)
    streams = [engine.generate(prompt, PARAMS, stream=stream) for prompt in INNOCENT[:2]]
    marked = msgspec.structs.replace(PARAMS, stop_token_ids=CURRENT_SEQUENCE, n=3)
    guilty = engine.generate(GUILTY, marked, stream=stream)
    streams.append(engine.generate(INNOCENT[2], PARAMS, stream=stream))
    await assert_it_fails_alone(engine, guilty, streams, wanted, "Fault: it broke while it was " + place)
    assert "Fault: it broke" in caplog.text  # the log has the whole trace


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ended", [True, False], ids=["at its end", "aborted"])
async def test_detokenization_fault_fails_its_request_and_no_other(
    engine: AsyncEngine, stream: bool, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [(await engine.generate(prompt, PARAMS).output()).outputs[0].token_ids for prompt in INNOCENT]
    (alone,) = (await engine.generate(GUILTY, PARAMS).output()).outputs
    marked = alone.token_ids[0]
    assert all(marked not in ids for ids in wanted)

    def breaking(right: Any) -> Any:
        def wrong(self: Any, ids: Sequence[int], *rest: Any) -> Any:
            if marked in list(ids):
                raise Fault("it has no text")
            return right(self, ids, *rest)

        return wrong

    for owner, name in ((Detokeniser, "push"), (Tokenizer, "shown"), (Tokenizer, "continuation")):
        monkeypatch.setattr(owner, name, breaking(getattr(owner, name)))
    before = engine.stats()["output_tokens"]
    guilty = engine.generate(GUILTY, PARAMS if ended else LONG, stream=stream)
    if not ended:
        await until(lambda: engine.stats()["output_tokens"] > before + 3)
        guilty.abort()
    others = [engine.generate(prompt, PARAMS, stream=stream) for prompt in INNOCENT]
    await assert_it_fails_alone(engine, guilty, others, wanted, "Fault: it has no text")
    assert engine._mailbox is not None
    await until(lambda: not engine._mailbox.streams)  # type: ignore[union-attr]
    assert engine._core._token_store.blocks_used == 0


async def test_prompt_logprobs_fault_fails_its_request_and_no_other(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [(await engine.generate(prompt, PARAMS).output()).outputs[0].token_ids for prompt in INNOCENT]

    def wrong(self: PromptLogprobs, scores: object) -> None:
        raise Fault("it has no log-probabilities")

    monkeypatch.setattr(PromptLogprobs, "take", wrong)
    others = [engine.generate(prompt, PARAMS) for prompt in INNOCENT]
    asking = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    await assert_it_fails_alone(engine, engine.generate(GUILTY, asking), others, wanted, "no log-probabilities")


@pytest.mark.parametrize(("owner", "name"), [(PromptOutputProcessor, "_add"), (EmbedRequest, "add_prompt_output")])
async def test_embedding_fault_fails_its_request_and_no_other(
    engine: AsyncEngine, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [(await engine.generate(prompt, PARAMS).output()).outputs[0].token_ids for prompt in INNOCENT]

    def wrong(*arguments: object) -> None:
        raise Fault("it has no vector")

    monkeypatch.setattr(owner, name, wrong)
    others = [engine.generate(prompt, PARAMS) for prompt in INNOCENT]
    with pytest.raises(EngineError, match="Fault: it has no vector"):
        await engine.embed([GUILTY])
    assert [(await one.output()).outputs[0].token_ids for one in others] == wanted
    assert engine.stats()["restarts"] == 0
    await asyncio.to_thread(assert_all_given_back, manager_of(engine))


def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    core = simulated_core(engine_info(vocab_size=100), dp=1)
    replica = replica_of(core, 0)
    replica.be_ready()
    send = replica.send

    def sending(messages: Sequence[ToManager]) -> None:
        if any(isinstance(one, Submit) and guilty_request(one) for one in messages):
            raise Fault("it has no bytes")
        send(messages)

    replica.send = sending  # type: ignore[method-assign]
    told: list[OpenRequest] = []
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [[1, 2, 3], GUILTY, [4, 5]]
    requests = [core.submit(prompt, params, None, told.extend, stream=False, later=True) for prompt in prompts]
    core.flush()
    guilty = requests.pop(1)
    wait_until(lambda: guilty in told)
    replica.settle()
    assert "Fault: it has no bytes" in str(guilty.error)
    assert [one.error for one in requests] == [None, None]
    assert all(one.ended() for one in requests)
    core.close()


def test_replica_deaths_caused_by_requests_do_not_use_up_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tok_core.replicas.replica_record.FIRST_PAUSE_SECONDS", 0.0)
    core = simulated_core(engine_info(), dp=1, max_restarts=1)
    for _ in range(5):
        replica_of(core, 0).be_ready()
        replica_of(core, 0).die("its manager met an error", by_request=True)
        assert core.health().state == "restarting"
    replica_of(core, 0).be_ready()
    replica_of(core, 0).die("its worker was killed")
    assert core.health().state == "restarting"
    replica_of(core, 0).die("it met an error before it served", by_request=True)
    assert core.health().state == "failed"
    core.close()


def test_engine_dead_error_carries_min_open_priority() -> None:
    core = simulated_core(engine_info(), dp=1)
    replica_of(core, 0).be_ready()
    params = [SamplingParams(max_tokens=4, priority=priority) for priority in (7, 3, 9)]
    requests = [core.submit([1, 2, 3], one, None, lambda _: None, stream=True) for one in params]
    core.abort(requests.pop(1).request_id)
    replica_of(core, 0).die("it met an error")
    assert [(type(one.error), getattr(one.error, "min_open_priority", None)) for one in requests] == [
        (EngineDead, 7)
    ] * 2
    with pytest.raises(EngineDead) as refused:
        core.submit([1], params[0], None, lambda _: None, stream=True)
    assert refused.value.min_open_priority is None
    core.close()


async def test_unexpected_manager_error_fails_requests_but_not_the_service(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(msgspec.structs.replace(config(path), max_restarts=0), in_process=True)
    await engine.start()
    take = OutputProcessor.take
    for _ in range(2):
        stream = engine.generate(GUILTY, LONG)
        await anext(aiter(stream))
        with monkeypatch.context() as patch:
            patch.setattr(OutputProcessor, "take", lambda self, output: {}[output.step])
            with pytest.raises(EngineDead, match="KeyError"):
                await stream.output()
        assert OutputProcessor.take is take
        await until(lambda: engine.health().ok)
        assert len((await engine.generate(INNOCENT[0], PARAMS).output()).outputs[0].token_ids) == 24
    await engine.close()


async def test_manager_crash_fails_requests_but_not_the_service(path: Path) -> None:
    engine = AsyncEngine(msgspec.structs.replace(config(path), max_restarts=0))
    await engine.start()

    def kill(role: str, number: int) -> None:
        replica = engine._core._replica_set.records[0].replica
        assert isinstance(replica, ProcessReplica)
        os.kill(replica.children[role].pid, number)

    stream = engine.generate(GUILTY, LONG)
    await anext(aiter(stream))
    kill("manager", signal.SIGSEGV)
    with pytest.raises(EngineDead, match="the manager process was killed by signal 11"):
        await stream.output()
    await until(lambda: engine.health().ok)
    assert len((await engine.generate(INNOCENT[0], PARAMS).output()).outputs[0].token_ids) == 24
    kill("worker", signal.SIGKILL)  # this may be the device's fault, so it counts as a restart
    await until(lambda: engine.health().state == "failed")
    await engine.close()
