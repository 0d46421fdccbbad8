"""An exception in the manager over one request fails that request; the step and other requests go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from support.guided import COMPILER, expected_guided, guided_manager, prepare
from support.patience import wait_until
from support.schedules import VOCAB, assert_all_given_back, drive, engine_info, expected, make_manager, submit
from support.simulated_worker import SimulatedPorts, collect
from tok_core import SamplingParams
from tok_core.grammar.local import LocalWorker, LocalWorkers
from tok_core.grammar.matchers import FollowResult, MatcherCall, MatcherReply, Verdict
from tok_core.grammar.worker_processes.worker import IDLE
from tok_core.manager import prompt_outputs
from tok_core.manager.admission import forecast_admission
from tok_core.manager.admission.forecast_admission import ForecastAdmission
from tok_core.manager.admission.sequence_starter import SequenceStarter
from tok_core.manager.faults import FaultyRequest
from tok_core.manager.grammar_manager import GrammarManager
from tok_core.manager.grammar_workers import GrammarWorker
from tok_core.manager.loop import Manager
from tok_core.manager.scheduling.batch_builder import BatchBuilder
from tok_core.manager.scheduling.prefill import ChunkedPrefill
from tok_core.manager.sequences import NEVER, State
from tok_core.messages import Cancel, StepInput, ToManager
from tok_core.sampling_params import Grammar

GUILTY = 5
PROMPTS = {rid: [rid, *range(rid, rid + 7)] for rid in (3, GUILTY, 4, 6)}
PLAIN = SamplingParams(n=2, max_tokens=12, seed=0, ignore_eos=True)
GRAMMAR = Grammar(kind="regex", value="[a-h]{3,30}(abcdef|01)")


class Fault(Exception):
    """The error that a test injects."""


def slot_of_guilty(table: Any, slot: int) -> bool:
    return bool(table.rid[slot] == GUILTY)


BIASED = msgspec.structs.replace(PLAIN, logit_bias={1: 0.5}, min_tokens=2)
LATE = msgspec.structs.replace(PLAIN, n=12)
ASKING = msgspec.structs.replace(PLAIN, prompt_logprobs=0)
GUIDED = SamplingParams(n=2, max_tokens=12, seed=0, grammar=GRAMMAR)
LONG = list(range(40))
PLACES: dict[str, tuple[Any, str, Callable[..., bool], SamplingParams, list[int]]] = {
    "given a chunk": (BatchBuilder, "chunk", lambda self, slot, *_: slot_of_guilty(self.table, slot), PLAIN, [5, 6]),
    "sampled first": (
        BatchBuilder,
        "add_sampling",
        lambda self, slot, forks: slot_of_guilty(self.table, slot),
        PLAIN,
        [5, 6],
    ),
    "started late": (BatchBuilder, "start", lambda self, slots: slot_of_guilty(self.table, slots[0]), LATE, [5, 6]),
    "read": (BatchBuilder, "_params", lambda self, slot: slot_of_guilty(self.table, slot), PLAIN, [5, 6]),
    "biased": (BatchBuilder, "_biases", lambda self, slot, params: slot_of_guilty(self.table, slot), BIASED, [5, 6]),
    "asked of its prompt": (prompt_outputs, "_pooled_rows", lambda request, *_: request.rid == GUILTY, ASKING, [5, 6]),
    "guided": (GrammarManager, "_begin", lambda self, slot: slot_of_guilty(self._table, slot), GUIDED, [5, 6]),
    "known to wait": (forecast_admission, "_known", lambda pending: pending.request.rid == GUILTY, PLAIN, [5, 6]),
    "prefilled": (
        ChunkedPrefill,
        "displaceable_rows",
        lambda self, slot, *_: slot_of_guilty(self._table, slot),
        PLAIN,
        LONG,
    ),
}


def break_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, guilty: Callable[..., bool]) -> list[int]:
    """Make a function raise where `guilty` returns True; return a list that grows with each fault."""
    right, faults = getattr(owner, name), list[int]()

    def wrong(*arguments: Any) -> Any:
        if guilty(*arguments):
            faults.append(1)
            raise Fault(f"{name} broke")
        return right(*arguments)

    monkeypatch.setattr(owner, name, wrong)
    return faults


def failures_of(ports: SimulatedPorts) -> dict[int, str]:
    failed = [one for report in ports.reports for one in report.failed]
    assert len(dict(failed)) == len(failed)
    return dict(failed)


def assert_others_are_right(
    manager: Manager, ports: SimulatedPorts, asked: Mapping[int, tuple[Sequence[int], SamplingParams]]
) -> None:
    tokens, _ = collect(ports.reports)
    for rid, (prompt, params) in asked.items():
        right = expected if params.grammar is None else expected_guided
        for sample in range(params.n):
            assert tokens[rid, sample] == right(prompt, sample, params), (rid, sample)
    assert not manager.intake.requests
    assert not manager.table.matchers
    assert_all_given_back(manager)


@pytest.mark.parametrize("run_ahead", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_fault_within_a_step_fails_its_request_and_keeps_other_rows(
    place: str, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, guilty, params, prompt = PLACES[place]
    manager, ports = guided_manager(engine_info(max_running=8, max_step_tokens=24), run_ahead)
    prepare(manager, [GRAMMAR])
    faults = break_at(monkeypatch, owner, name, guilty)
    asked = {rid: (PROMPTS[rid], GUIDED if rid == 4 else PLAIN) for rid in (3, 4, 6)}
    messages: list[ToManager] = [submit(rid, *one) for rid, one in asked.items()]
    messages.insert(1, submit(GUILTY, prompt, params))
    drive(manager, ports, {0: messages})
    assert faults
    failed = failures_of(ports)
    assert failed.keys() == {GUILTY}
    assert f"Fault: {name} broke" in failed[GUILTY]
    assert_others_are_right(manager, ports, asked)


def test_fault_in_logit_biases_keeps_all_rows_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def steps_of(broken: bool) -> list[StepInput]:
        manager, ports = make_manager(engine_info(max_running=8), run_ahead=1)
        messages: list[ToManager] = [submit(rid, PROMPTS[rid], BIASED) for rid in (3, GUILTY, 4)]
        with monkeypatch.context() as patch:
            if broken:
                break_at(patch, BatchBuilder, "_biases", lambda self, slot, _: slot_of_guilty(self.table, slot))
            ports.inbox += messages
            manager.turn()
        return ports.steps

    (right,), (found,) = steps_of(broken=False), steps_of(broken=True)
    for column in ("prefill_slot", "prefill_token", "sample_row", "sample_slot", "page_id"):
        assert np.array_equal(getattr(found, column), getattr(right, column)), column
    assert right.new is not None
    assert found.new is not None
    assert np.array_equal(found.new.slot, right.new.slot)
    guilty = set(right.new.bias_slot.tolist()) - set(found.new.bias_slot.tolist())
    assert len(guilty) == BIASED.n
    kept = ~np.isin(right.new.bias_slot, list(guilty))
    assert np.array_equal(found.new.bias_value, right.new.bias_value[kept])
    assert found.sample_slot[found.bias_row].tolist() == [
        slot for slot in right.sample_slot[right.bias_row].tolist() if slot not in guilty
    ]
    assert right.new.bias_until.max() == NEVER


def test_fault_not_due_to_a_single_request_is_reraised(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, ports = make_manager(engine_info())
    break_at(monkeypatch, BatchBuilder, "_written", lambda *_: True)
    ports.inbox += [submit(3, [1, 2], PLAIN)]
    with pytest.raises(Fault, match="_written broke"):
        manager.turn()


def test_cancelled_prefilling_request_no_longer_counts_its_forks() -> None:
    """After each turn, `drive` compares the recorded number of running samples of each caller with the actual one."""
    manager, ports = make_manager(engine_info(max_step_tokens=8))
    asked = {3: (LONG, PLAIN)}
    messages: list[ToManager] = [submit(GUILTY, [*LONG, 1], PLAIN), submit(3, *asked[3])]
    drive(manager, ports, {0: messages}, until=lambda: bool(manager.scheduler.starter.pending_forks))
    drive(manager, ports, {0: [Cancel(GUILTY)]})
    assert_others_are_right(manager, ports, asked)


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_fault_requeueing_a_preempted_sample_fails_only_its_request(
    run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a higher class take the faulty one's slots: some at once, others once their last tokens are back."""
    manager, ports = make_manager(engine_info(), run_ahead)
    faults = break_at(monkeypatch, SequenceStarter, "requeue", lambda self, slot: slot_of_guilty(self.table, slot))
    lowest = msgspec.structs.replace(PLAIN, n=3, max_tokens=40, priority=9)
    asked = {rid: (PROMPTS[rid], PLAIN) for rid in (3, 4, 6)}
    later = [submit(rid, *one) for rid, one in asked.items()]
    drive(manager, ports, {0: [submit(GUILTY, PROMPTS[GUILTY], lowest)], 9: later})
    assert faults
    assert failures_of(ports).keys() == {GUILTY}
    assert_others_are_right(manager, ports, asked)


def test_fault_in_the_forecast_names_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, ports = make_manager(engine_info(max_running=1))
    drive(
        manager,
        ports,
        {0: [submit(rid, PROMPTS[rid], PLAIN) for rid in (3, GUILTY)]},
        until=lambda: bool((manager.table.state == State.DECODE).any()),
    )
    break_at(monkeypatch, SequenceStarter, "costs", lambda _, pending, *rest: pending.request.rid == GUILTY)
    assert isinstance(manager.scheduler.admission, ForecastAdmission)
    with pytest.raises(FaultyRequest) as raised:
        manager.scheduler.admission._typical()
    assert raised.value.rid == GUILTY


class ForgingWorker:
    """A grammar worker whose replies `forge` may change."""

    def __init__(self, worker: LocalWorker, workers: ForgingWorkers) -> None:
        self._worker = worker
        self._workers = workers
        self.at = IDLE

    def send(self, work: MatcherCall) -> None:
        self._workers.sending(work)
        self._worker.send(work)

    def receive(self) -> list[Verdict | MatcherReply]:
        return [self._workers.forge(one) for one in self._worker.receive()]

    def close(self) -> None:
        self._worker.close()
        self._workers.closing()


class ForgingWorkers(LocalWorkers):
    """Grammar workers: a forging one for the faulty grammar, normal ones for others."""

    def __init__(self) -> None:
        super().__init__(lambda: COMPILER)
        self.forge: Callable[[Any], Any] = lambda one: one
        self.sending: Callable[[MatcherCall], None] = lambda work: None
        self.closing: Callable[[], None] = lambda: None
        self.beginning: Callable[[], None] = lambda: None

    def begin(self, grammar: Grammar) -> GrammarWorker:  # type: ignore[override]
        if grammar != GUILTY_GRAMMAR:
            return super().begin(grammar)
        self.beginning()
        return ForgingWorker(super().begin(grammar), self)


GUILTY_GRAMMAR = Grammar(kind="regex", value="[a-h]{3,30}(abcdef|0)")
FAULTY = msgspec.structs.replace(GUIDED, grammar=GUILTY_GRAMMAR)


def forging_manager() -> tuple[Manager, SimulatedPorts, ForgingWorkers]:
    workers = ForgingWorkers()
    manager, ports = guided_manager(engine_info(max_running=8))
    manager.grammars.pool.workers = workers
    return manager, ports, workers


def drive_guided(manager: Manager, ports: SimulatedPorts, *guilty: int) -> None:
    """Run requests under the faulty grammar beside others, whose tokens must be right."""
    asked = {3: (PROMPTS[3], GUIDED), 6: (PROMPTS[6], PLAIN)}
    messages: list[ToManager] = [submit(rid, *one) for rid, one in asked.items()]
    drive(manager, ports, {0: [*[submit(rid, PROMPTS[rid], FAULTY) for rid in guilty], *messages]})
    assert_others_are_right(manager, ports, asked)


def changed(**columns: Any) -> Callable[[Any], Any]:
    """Return a forger that replaces fields of a reply's first sequence."""

    def forge(one: Any) -> Any:
        if not isinstance(one, MatcherReply) or not one.followed:
            return one
        first = msgspec.structs.replace(one.followed[0], **columns)
        return msgspec.structs.replace(one, followed=[first, *one.followed[1:]])

    return forge


@pytest.mark.parametrize(
    "columns",
    [
        {"mask": 10_000},
        {"run": [VOCAB]},
        {"run": [-1]},
        {"given": [1 << 40]},
        {"run": ["x"]},
        {"run": None, "given": 3},
    ],
)
def test_invalid_matcher_reply_for_a_sequence_fails_its_request(columns: dict[str, Any]) -> None:
    manager, ports, workers = forging_manager()
    prepare(manager, [GRAMMAR, GUILTY_GRAMMAR])
    named = list[int]()

    def forge(one: Any) -> Any:
        if named or not isinstance(one, MatcherReply) or not one.followed:
            return one
        (guide,) = (guide for guide in manager.grammars.pool.states.values() if guide.grammar == GUILTY_GRAMMAR)
        named.append(int(manager.table.rid[guide.matchers[one.followed[0].sequence].slot]))
        return changed(**columns)(one)

    workers.forge = forge
    asked = {4: (PROMPTS[4], FAULTY), 5: (PROMPTS[5], FAULTY), 3: (PROMPTS[3], GUIDED), 6: (PROMPTS[6], PLAIN)}
    drive(manager, ports, {0: [submit(rid, *one) for rid, one in asked.items()]})
    failed = failures_of(ports)
    assert list(failed) == named
    assert failed[named[0]].startswith("the grammar cannot be followed: ")
    del asked[named[0]]
    assert_others_are_right(manager, ports, asked)


def broken_answer(one: Any) -> Any:
    if isinstance(one, MatcherReply):
        raise msgspec.DecodeError("Input data was truncated")
    return one


@pytest.mark.parametrize(
    "forge",
    [
        broken_answer,
        lambda one: msgspec.structs.replace(one, masks=[b"123"]) if isinstance(one, MatcherReply) else one,
        lambda one: (
            msgspec.structs.replace(one, masks=[mask + bytes(28) for mask in one.masks])
            if isinstance(one, MatcherReply)
            else one
        ),
        lambda one: msgspec.structs.replace(one, first=b"") if isinstance(one, Verdict) else one,
        lambda one: msgspec.structs.replace(one, first=one.first + bytes(28)) if isinstance(one, Verdict) else one,
        lambda one: msgspec.structs.replace(one, begin=b"12" * 9) if isinstance(one, Verdict) else one,
        lambda one: MatcherReply([], 0, []) if isinstance(one, Verdict) else one,
    ],
    ids=["undecodable", "torn mask", "long mask", "no first mask", "long first mask", "few tokens", "no verdict"],
)
@pytest.mark.parametrize("known", [True, False])
def test_malformed_grammar_worker_reply_fails_requests_of_its_grammar(forge: Callable[[Any], Any], known: bool) -> None:
    """With `known`, another grammar is compiled before; otherwise the malformed reply is the first one."""
    manager, ports, workers = forging_manager()
    if known:
        prepare(manager, [GRAMMAR])
    workers.forge = forge
    ports.inbox += [submit(rid, PROMPTS[rid], FAULTY) for rid in (4, GUILTY)]
    if known:  # one step then holds masks of both grammars
        ports.inbox.append(submit(7, [7], GUIDED))

    def failed() -> bool:
        if not manager.turn():
            ports.wait(0)
        return failures_of(ports).keys() == {4, GUILTY}

    wait_until(failed)
    prepare(manager, [GRAMMAR])
    workers.forge = lambda one: one
    prepare(manager, [GUILTY_GRAMMAR])
    drive_guided(manager, ports)
    assert failures_of(ports).keys() == {4, GUILTY}
    if known:
        tokens, _ = collect(ports.reports)
        assert all(tokens[7, sample] == expected_guided([7], sample, GUIDED) for sample in range(GUIDED.n))


def test_matcher_reply_for_a_cancelled_request_is_ignored() -> None:
    manager, ports, workers = forging_manager()
    prepare(manager, [GRAMMAR, GUILTY_GRAMMAR])
    held, cancelled = list[Any](), list[int]()

    def forge(one: Any) -> Any:
        if cancelled:
            return one
        held.append(one)
        return MatcherReply([], one.first, [])

    def cancel() -> bool:
        if held and not cancelled:
            ports.inbox.append(Cancel(GUILTY))
            cancelled.append(GUILTY)
        return False

    workers.forge = forge
    messages: list[ToManager] = [submit(GUILTY, PROMPTS[GUILTY], FAULTY), submit(4, PROMPTS[4], GUIDED)]
    drive(manager, ports, {0: messages}, until=cancel)
    (guide,) = (guide for guide in manager.grammars.pool.states.values() if guide.grammar == GUILTY_GRAMMAR)
    unknown = MatcherReply([FollowResult(10_000, [1], [], 0), *held[0].followed], held[0].first, held[0].masks)
    manager.grammars._take(guide, unknown)
    assert manager.grammars.advance() is None
    workers.forge = lambda one: one
    drive_guided(manager, ports)
    assert not failures_of(ports)


def test_send_error_to_a_grammar_worker_fails_requests_of_its_grammar() -> None:
    manager, ports, workers = forging_manager()
    prepare(manager, [GRAMMAR, GUILTY_GRAMMAR])

    def raising(*_: object) -> None:
        raise OSError("no buffer space")

    workers.sending = workers.closing = raising
    drive_guided(manager, ports, 4, GUILTY)
    assert failures_of(ports).keys() == {4, GUILTY}


def test_grammar_worker_that_cannot_start_fails_requests_of_its_grammar() -> None:
    manager, ports, workers = forging_manager()
    prepare(manager, [GRAMMAR])

    def raising() -> None:
        raise Fault("no worker")

    workers.beginning = raising
    drive_guided(manager, ports, 4, GUILTY)
    assert failures_of(ports).keys() == {4, GUILTY}


def test_fault_in_grammar_matching_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, ports = guided_manager(engine_info(max_running=8))
    prepare(manager, [GRAMMAR, GUILTY_GRAMMAR])
    break_at(monkeypatch, GrammarManager, "_follow", lambda self, slot, *_: slot_of_guilty(self._table, slot))
    drive_guided(manager, ports, GUILTY)
    assert failures_of(ports).keys() == {GUILTY}
