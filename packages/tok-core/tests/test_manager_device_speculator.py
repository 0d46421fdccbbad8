"""Drafts that the worker accepts: steps run ahead of them, and no sequence passes its limit or takes others' memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.schedules import assert_all_given_back, drive, engine_info, expected, make_manager, submit
from support.simulated_worker import SimulatedPorts, collect
from tok_core import SamplingParams
from tok_core.config import Speculate
from tok_core.manager.kv_cache import Paging
from tok_core.manager.loop import Manager
from tok_core.manager.scheduling import scheduler
from tok_core.manager.sequences import SequenceTable, State
from tok_core.manager.speculation import DeviceSpeculator, device_speculator
from tok_core.manager.speculation.device_speculator import IDLE_STEPS, PRIOR, SLOT_WINDOW, PredictableShares
from tok_core.manager.speculation.drafts import reserve_pages
from tok_core.messages import Int32, Int64, StepInput, StepOutput

PROMPT = [1, 2, 3]


def drafting(run_ahead: int, speculate: Speculate = 3, **sizes: float) -> tuple[Manager, SimulatedPorts]:
    """Return a manager whose worker drafts right tokens, except that some are missing."""
    info = engine_info(**{"max_running": 16, "drafts_on_device": True, **sizes})
    return make_manager(info, run_ahead, groups=False, speculate=speculate)


def expect_acceptance(manager: Manager) -> None:
    """Let the manager expect from the first step on that drafts are accepted, and whatever returns."""
    assert isinstance(manager.speculator, DeviceSpeculator)
    setattr(manager.speculator.shares, "of", lambda slots: np.full(len(slots), 0.9))  # noqa: B010


def drafted_in_flight(ports: SimulatedPorts) -> list[StepInput]:
    """Return the steps in flight that verify drafts."""
    queued = {output.step for output in ports.queued}
    return [step for step in ports.steps if step.step in queued and step.verify_rows is not None]


def assert_tokens(ports: SimulatedPorts, rids: int, params: SamplingParams) -> None:
    tokens, _ = collect(ports.reports)
    for rid in range(rids):
        for sample in range(params.n):
            assert tokens[rid, sample] == expected(PROMPT, sample, params)


def test_steps_are_sent_while_several_steps_with_drafts_are_in_flight() -> None:
    manager, ports = drafting(run_ahead=4)
    params, in_flight, ahead = SamplingParams(max_tokens=60, seed=1, ignore_eos=True), list[int](), list[int]()

    def look() -> bool:
        in_flight.append(len(drafted_in_flight(ports)))
        ahead.append(int(manager.table.ahead.max()))
        assert manager.speculator is not None
        assert not manager.speculator.waits
        return False

    drive(manager, ports, {0: [submit(0, PROMPT, params)]}, look)
    assert_tokens(ports, 1, params)
    assert max(in_flight) == 4
    assert max(ahead) == 4 * 3  # reserved for, if all of it is accepted
    assert manager.stats().accepted_tokens > 30
    assert manager.scheduler.steps < 40
    assert_all_given_back(manager)


def test_drafts_are_considered_in_few_steps_while_nothing_is_predictable(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, ports = drafting(run_ahead=2)
    speculator, considered = manager.speculator, list[int]()
    assert isinstance(speculator, DeviceSpeculator)
    choose = speculator._choose

    def counted(decode: Int64, rows: int, room: int) -> tuple[Int64, Int64, Int32]:
        considered.append(manager.scheduler.steps)
        return choose(decode, rows, room)

    monkeypatch.setattr(speculator, "_choose", counted)
    monkeypatch.setattr(speculator.shares, "of", lambda slots: np.zeros(len(slots)))
    drive(manager, ports, {0: [submit(0, PROMPT, SamplingParams(max_tokens=60, seed=1, ignore_eos=True))]})
    assert manager.stats().drafted_tokens == 0
    assert set(np.diff(considered)) == {IDLE_STEPS}
    expect_acceptance(manager)
    drive(manager, ports, {0: [submit(1, PROMPT, SamplingParams(max_tokens=60, seed=2, ignore_eos=True))]})
    assert manager.stats().accepted_tokens > 30
    assert 1 in np.diff(considered)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 9, 61])
@pytest.mark.parametrize(("run_ahead", "speculate"), [(1, 4), (2, 1), (3, 16), (4, 4), (8, 1), (8, 16)])
def test_sequences_stay_below_their_limit_if_all_drafts_are_accepted(
    run_ahead: int, speculate: Speculate, max_tokens: int
) -> None:
    manager, ports = drafting(run_ahead, speculate)
    params, table, worker = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True), manager.table, ports.worker
    worker.unpredictable = 0.0
    expect_acceptance(manager)
    limit = len(PROMPT) + max_tokens

    def look() -> bool:
        slots = table.in_state(State.DECODE)
        assert (table.length[slots] + table.ahead[slots] <= table.limit[slots]).all()
        assert (worker.length[slots] < limit).all()  # the last token is never fed
        return False

    drive(manager, ports, {0: [submit(0, PROMPT, params)]}, look)
    assert_tokens(ports, 1, params)
    stats = manager.stats()
    assert stats.accepted_tokens == stats.drafted_tokens
    assert stats.drafted_tokens > 0 or max_tokens < 6
    assert_all_given_back(manager)


def test_short_cache_has_no_pages_for_drafts_and_preempts_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, ports = drafting(run_ahead=3, page_size=1, num_pages=150, max_step_tokens=32)
    reclaimer = manager.reclaimer
    preempt, reserved, left = reclaimer.preempt_for_pages, list[bool](), list[int]()

    def recorded_reserve(paging: Paging, slots: Int64, length: Int64) -> bool:
        preemptions, pages = reclaimer.preemptions, manager.table.num_pages.copy()
        reserved.append(reserve_pages(paging, slots, length))
        assert reclaimer.preemptions == preemptions
        assert reserved[-1] or (manager.table.num_pages == pages).all()
        return reserved[-1]

    def recorded_preempt(slot: int) -> None:
        left.append(manager.paging.available)
        preempt(slot)

    monkeypatch.setattr(device_speculator, "reserve_pages", recorded_reserve)
    monkeypatch.setattr(reclaimer, "preempt_for_pages", recorded_preempt)
    params = SamplingParams(n=4, max_tokens=60, seed=1, ignore_eos=True)
    drive(manager, ports, {0: [submit(0, PROMPT, params)]})
    assert_tokens(ports, 1, params)
    assert reserved.count(True) > 3
    assert reserved.count(False) > 0
    assert left
    assert max(left) < params.n  # the plain rows of a step needed more pages than that
    assert_all_given_back(manager)


def test_slot_lent_by_a_step_in_flight_may_get_a_new_request() -> None:
    manager, ports = drafting(run_ahead=4, max_running=4)
    params, claimed = SamplingParams(max_tokens=30, seed=1, ignore_eos=True), list[int]()

    def look() -> bool:
        if ports.steps and (new := ports.steps[-1].new) is not None:
            lent = [step.verify_rows.lent for step in drafted_in_flight(ports)[:-1] if step.verify_rows is not None]
            claimed.extend(set(new.slot.tolist()).intersection(*(set(one.flatten().tolist()) for one in lent[-1:])))
        return False

    drive(manager, ports, {turn: [submit(rid, PROMPT, params)] for rid, turn in enumerate((0, 6, 12))}, look)
    assert_tokens(ports, 3, params)
    assert claimed
    assert_all_given_back(manager)


def test_rows_of_ended_sequences_count_for_no_sequence() -> None:
    manager, ports = drafting(run_ahead=6, max_running=4, num_pages=256)
    table, speculator = manager.table, manager.speculator
    assert isinstance(speculator, DeviceSpeculator)
    observe, counted = speculator.shares.observe, list[int]()

    def recorded_observe(slots: Int64, right: Int32, tokens: Int32) -> None:
        assert np.isin(table.state[slots], (State.DECODE, State.PREEMPTED)).all()
        counted.extend(slots.tolist())
        observe(slots, right, tokens)

    setattr(speculator.shares, "observe", recorded_observe)  # noqa: B010
    params = SamplingParams(n=3, max_tokens=40, seed=1, stop_token_ids=tuple(range(0, 50, 5)))  # unknown to the worker
    drive(manager, ports, {turn: [submit(rid, PROMPT, params)] for rid, turn in enumerate((0, 5, 10))})
    assert_tokens(ports, 3, params)
    assert len(counted) > 40
    assert manager.stats().discarded_tokens > 0


@pytest.mark.parametrize(("accuracy", "fails"), [(1.0, True), (0.0, False)])
def test_request_fails_if_logits_of_an_accepted_row_are_not_finite(accuracy: float, fails: bool) -> None:
    manager, ports = drafting(run_ahead=3)
    ports.worker.draft_accuracy = accuracy
    expect_acceptance(manager)
    run, broken = ports.worker.run, list[int]()

    def run_broken(step: StepInput) -> StepOutput:
        output = run(step)
        if step.verify_rows is not None and step.step > 5 and (output.accepted.any() or not fails):
            first = step.verify_rows.lent[0, 0]
            output.logprob[step.sample_slot == first] = np.nan
            broken.append(step.step)
        return output

    setattr(ports.worker, "run", run_broken)  # noqa: B010
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    drive(manager, ports, {0: [submit(0, PROMPT, params)]})
    failed = [reason for report in ports.reports for _, reason in report.failed]
    tokens, _ = collect(ports.reports)
    wanted = expected(PROMPT, 0, params)
    assert broken
    if fails:
        (reason,) = failed
        assert "logits are not finite" in reason
        assert tokens[0, 0] == wanted[: len(tokens[0, 0])]
        assert len(tokens[0, 0]) < len(wanted)
    else:
        assert not failed
        assert tokens[0, 0] == wanted
    assert_all_given_back(manager)


def shares_of(slots: int) -> tuple[PredictableShares, SequenceTable]:
    table = SequenceTable(slots, 16, 4)
    return PredictableShares(table), table


def observe(shares: PredictableShares, slot: int, right: int, tokens: int) -> None:
    shares.observe(one(slot), np.array([right], np.int32), np.array([tokens], np.int32))


def one(slot: int) -> Int64:
    return np.array([slot])


@given(st.data())
def test_predictable_shares_lie_between_zero_and_one(data: st.DataObject) -> None:
    shares, table = shares_of(6)
    slots = np.arange(6)
    for _ in range(data.draw(st.integers(0, 40))):
        table.family[:] = data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
        table.epoch += np.array(data.draw(st.lists(st.booleans(), min_size=6, max_size=6)))
        seen = np.array(sorted(data.draw(st.sets(st.integers(0, 5)))), np.int64)
        counts = st.lists(st.integers(0, 17), min_size=len(seen), max_size=len(seen))
        tokens: Int32 = np.array(data.draw(counts), np.int32)
        right: Int32 = np.minimum(tokens, np.array(data.draw(counts), np.int32))
        shares.observe(seen, right, tokens)
        found = shares.of(slots)
        assert ((found >= 0) & (found <= 1)).all()


def test_new_owner_of_a_slot_starts_with_the_share_of_its_family() -> None:
    shares, table = shares_of(4)
    table.family[:] = [1, 1, 2, 2]
    for _ in range(200):
        observe(shares, 0, 1, 1)
        observe(shares, 2, 0, 1)
    (kept,) = shares.of(one(0))
    assert kept > 0.9
    table.epoch[0] += 1
    table.family[0] = 2
    (anew,) = shares.of(one(0))
    (sibling,) = shares.of(one(3))
    assert anew == sibling < 0.1


def test_unknown_family_has_the_share_of_all_sequences() -> None:
    shares, table = shares_of(4)
    table.family[:] = [1, 1, 2, 3]
    assert shares.of(one(3)).tolist() == [0]  # nothing is drafted before something was predictable
    for _ in range(100):
        observe(shares, 0, 1, 1)
        observe(shares, 2, 0, 1)
    (of_all,) = shares.of(one(3))
    assert of_all == pytest.approx(0.5, abs=0.01)
    (of_family,) = shares.of(one(1))
    assert of_family > 0.9


def test_share_of_a_sequence_outweighs_its_family_after_some_tokens() -> None:
    shares, table = shares_of(2)
    table.family[:] = 1
    for _ in range(100):
        observe(shares, 0, 0, 1)
    for _ in range(int(SLOT_WINDOW)):
        observe(shares, 1, 1, 1)
    (found,) = shares.of(one(1))
    assert found > SLOT_WINDOW / (SLOT_WINDOW + PRIOR)
    for _ in range(int(SLOT_WINDOW)):  # an estimate follows a change: older tokens count less
        observe(shares, 1, 0, 1)
    assert shares.of(one(1))[0] < 0.4


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
@pytest.mark.parametrize(("page_size", "num_pages"), [(16, 13), (4, 52)])
def test_only_pages_that_are_certainly_needed_lead_to_preemption(
    accuracy: float, page_size: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = engine_info(max_running=16, drafts_on_device=True, page_size=page_size, num_pages=num_pages)
    manager, ports = make_manager(info, 4, groups=False, speculate=8, admission="watermark")
    ports.worker.draft_accuracy = accuracy
    expect_acceptance(manager)
    table, preempt, missing = manager.table, manager.reclaimer.preempt_for_pages, list[int]()

    def recorded_preempt(slot: int) -> None:
        full = table.length == table.num_pages * page_size
        missing.append(int(np.count_nonzero(full & (table.state == State.DECODE))) - manager.paging.available)
        preempt(slot)

    monkeypatch.setattr(manager.reclaimer, "preempt_for_pages", recorded_preempt)
    params = SamplingParams(n=6, max_tokens=50, seed=1, ignore_eos=True)
    drive(manager, ports, {0: [submit(0, PROMPT, params)]})
    assert_tokens(ports, 1, params)
    assert min(missing, default=1) > 0
    assert manager.stats().drafted_tokens > 0


def test_more_guided_sequences_than_may_draft_ask_for_no_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_DRAFTING", 2)
    manager, ports = drafting(run_ahead=2)
    params = SamplingParams(n=3, max_tokens=10, seed=1, ignore_eos=True)
    drive(manager, ports, {0: [submit(0, PROMPT, params)]})
    asked = {len(step.decode_slot) > 2: step.predicted_tokens for step in ports.steps if step.verify_rows is None}
    assert asked[True] == 0
    assert asked[False] == 3


@pytest.mark.parametrize("salt", [b"", 16 * b"a"])
def test_family_of_a_prompt_outlives_a_cleared_cache(salt: bytes) -> None:
    manager, ports = drafting(run_ahead=2)
    params, families = SamplingParams(max_tokens=10, seed=1), list[int]()
    for rid, salts in enumerate((salt, salt, 16 * b"b")):
        ports.inbox.append(submit(rid, PROMPT, params, salt=salts))
        manager.turn()
        families.append(manager.intake.requests[rid].family)
        manager.intake.start_new_cache()
    assert families[0] == families[1]
    assert families[0] >> 32 != families[2] >> 32
