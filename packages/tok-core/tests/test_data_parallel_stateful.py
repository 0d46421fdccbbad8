"""Random requests, aborts and replica deaths: each request ends with its tokens or an error, and leaves no load."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from support.replicas import replica_of, simulated_core
from support.schedules import VOCAB, engine_info, expected
from tok_core import EngineDead, SamplingParams
from tok_core.engine.open_requests import OpenRequest

REPLICAS = 3
INFO = engine_info(num_pages=400, max_running=160, max_step_tokens=256)
STEMS = [[(start + token) % VOCAB for token in range(40)] for start in (10, 20, 30)]
CHOSEN = st.integers(0, REPLICAS - 1)  # index into the replicas in question, modulo their number
REQUESTS = st.tuples(
    st.integers(0, len(STEMS) - 1),
    st.integers(1, 40),
    st.builds(
        SamplingParams,
        n=st.sampled_from([1, 3, 70]),
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
        temperature=st.just(0),
    ),
    st.booleans(),
)


class Machine(RuleBasedStateMachine):
    """A core of simulated replicas, and the samples of which each request's owner has received tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.core = simulated_core(INFO, dp=REPLICAS, max_restarts=1000)
        for number in range(REPLICAS):
            replica_of(self.core, number).be_ready()
        self.told: dict[int, set[int]] = {}  # samples of which the owner has received tokens, by rid
        self.open: list[OpenRequest] = []

    def heard(self, requests: Sequence[OpenRequest]) -> None:
        for request in requests:
            samples = self.told.setdefault(request.rid, set())
            samples.update(delta.index for delta in request.take())

    def ready(self) -> list[int]:
        return self.core._replica_set.ready()

    @precondition(lambda self: self.ready())
    @rule(asked=st.lists(REQUESTS, min_size=1, max_size=4))
    def submits(self, asked: list[tuple[int, int, SamplingParams, bool]]) -> None:
        for stem, length, params, stream in asked:
            self.open.append(self.core.submit(STEMS[stem][:length], params, None, self.heard, stream=stream))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def aborts(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.open))
        ended = request.ended()
        self.core.abort(request.request_id)
        assert request.ended()
        if not ended:
            assert self.core._open.named(request.request_id) is None
            self.open.remove(request)

    @rule(turns=st.integers(1, 6))
    def works(self, turns: int) -> None:
        for number in self.ready() * turns:
            replica_of(self.core, number).turn()

    @precondition(lambda self: len(self.ready()) < REPLICAS)
    @rule(chosen=CHOSEN)
    def comes_back(self, chosen: int) -> None:
        starting = sorted(set(range(REPLICAS)) - set(self.ready()))
        replica_of(self.core, starting[chosen % len(starting)]).be_ready()

    @precondition(lambda self: self.ready())
    @rule(chosen=CHOSEN)
    def dies(self, chosen: int) -> None:
        number = self.ready()[chosen % len(self.ready())]
        hit = {
            one.rid: [part for part in one.parts if part.replica == number and one.runs(part.samples)]
            for one in self.open
            if not one.ended()
        }
        others = [other for other in self.ready() if other != number]
        replica_of(self.core, number).die("the worker process was killed by signal 9")
        for request in self.open:
            lost = hit.get(request.rid, [])
            told = any(sample in self.told.get(request.rid, ()) for part in lost for sample in part.samples)
            if lost and (told or not others or any(part.redispatched for part in lost)):
                with pytest.raises(EngineDead, match=f"killed by signal 9 .replica {number}."):
                    raise request.error or AssertionError("it goes on")
            elif lost:
                assert request.error is None
                assert number not in [part.replica for part in request.parts]

    @invariant()
    def counts_are_those_of_open_requests(self) -> None:
        router, running = self.core._router, list(self.core._open.by_rid.values())
        for number, outstanding in enumerate(router.loads):
            parts = [part for one in running for part in one.parts if part.replica == number]
            assert len(outstanding) == len({one.rid for one in running for part in one.parts if part.replica == number})
            assert outstanding.tokens == int(outstanding._left.sum())
            assert bool(outstanding.tokens) <= bool(parts)

    @invariant()
    def what_has_ended_is_right(self) -> None:
        for request in [one for one in self.open if one.ended()]:
            self.open.remove(request)
            if request.error is not None:
                continue
            for index, sample in enumerate(request.output().outputs):
                assert sample.index == index
                assert sample.token_ids == expected(request.prompt, index, request.params)

    def teardown(self) -> None:
        while len(self.ready()) < REPLICAS:
            self.comes_back(0)
        for number in range(REPLICAS):
            replica_of(self.core, number).settle()
        self.what_has_ended_is_right()
        assert self.open == []
        assert [outstanding.tokens for outstanding in self.core._router.loads] == [0] * REPLICAS
        assert self.core._token_store.blocks_used == 0
        self.core.close()


def test_every_request_ends_and_leaves_no_load_when_replicas_die(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tok_core.replicas.replica_record.FIRST_PAUSE_SECONDS", 0.0)
    caplog.set_level(logging.CRITICAL, "tok_core")
    run_state_machine_as_test(Machine, settings=settings(max_examples=12, stateful_step_count=40, deadline=None))
