"""Higher priority classes do not wait for lower ones; callers and requests of one class get fair shares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.schedules import (
    assert_all_given_back,
    check,
    drive,
    engine_info,
    expected,
    make_manager,
    submit,
)
from support.simulated_worker import SimulatedPorts, collect
from tok_core import SamplingParams
from tok_core.manager.admission.fair_shares import MAX_LOST_SHARE, MAX_SHARING_REQUESTS, QUANTUM
from tok_core.manager.loop import Manager
from tok_core.manager.sequences import State
from tok_core.messages import EngineInfo, ToManager

LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
SOON = 8  # turns: steps in flight, one for the slot to be freed, and one to compute


class Clock:
    """A clock that advances by `tick` seconds at each call."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "seed": 1, **values})  # type: ignore[arg-type]


def turns_until_first_token(manager: Manager, ports: SimulatedPorts, rid: int, most: int = 400) -> int:
    """Return the manager's turns until a token of `rid` is reported."""
    for turn in range(most):
        if any(rid in report.rid for report in ports.reports):
            return turn
        if not manager.turn():
            ports.wait(0)
        check(manager)
    return most


def fill(manager: Manager, ports: SimulatedPorts, *messages: ToManager, turns: int = 12) -> None:
    """Submit the messages and run `turns` turns."""
    ports.inbox += messages
    for _ in range(turns):
        if not manager.turn():
            ports.wait(0)


def finish(manager: Manager, ports: SimulatedPorts, asked: dict[int, tuple[list[int], SamplingParams]]) -> None:
    """Run all requests to their ends; check that their tokens follow from their own contexts."""
    drive(manager, ports, {})
    tokens, _ = collect(ports.reports)
    for rid, (prompt, one) in asked.items():
        for sample in range(one.n):
            assert tokens[rid, sample] == expected(prompt, sample, one)
    assert_all_given_back(manager)


def running(manager: Manager, rid: int) -> int:
    table = manager.table
    return int(np.count_nonzero((table.rid == rid) & np.isin(table.state, (State.PREFILL, State.DECODE))))


@pytest.mark.parametrize("pp", [1, 3])
@pytest.mark.parametrize("n", [1, 40])
def test_higher_priority_gets_a_slot_at_once_when_lower_holds_all(n: int, pp: int) -> None:
    manager, ports = make_manager(engine_info(max_running=8, num_pages=400), pp=pp)
    asked = {rid: ([1, 2, rid], params(n=n, priority=5)) for rid in range(40 // n)}
    fill(manager, ports, *(submit(rid, *one) for rid, one in asked.items()))
    assert not manager.table.free_slots
    asked[99] = [7, 8, 9], params(max_tokens=8)
    ports.inbox.append(submit(99, *asked[99]))
    assert turns_until_first_token(manager, ports, 99) <= SOON * pp
    finish(manager, ports, asked)


def test_higher_priority_gets_pages_when_lower_holds_all() -> None:
    manager, ports = make_manager(engine_info(max_running=8, num_pages=48))
    asked = {rid: ([rid + 1] * 20, params(max_tokens=44, priority=5)) for rid in range(6)}
    fill(manager, ports, *(submit(rid, *one) for rid, one in asked.items()), turns=30)
    asked[99] = [9] * 60, params(max_tokens=4)
    ports.inbox.append(submit(99, *asked[99]))
    assert turns_until_first_token(manager, ports, 99) <= SOON
    finish(manager, ports, asked)


def test_higher_priority_gets_the_step_tokens_that_lower_would_fill() -> None:
    manager, ports = make_manager(engine_info(max_running=8, max_step_tokens=8, num_pages=400))
    asked = {rid: ([1, 2, rid], params(priority=5, max_tokens=60)) for rid in range(8)}
    fill(manager, ports, *(submit(rid, *one) for rid, one in asked.items()), turns=20)
    asked[99] = list(range(40)), params(max_tokens=8)
    ports.inbox.append(submit(99, *asked[99]))
    assert turns_until_first_token(manager, ports, 99) <= SOON + 40 // 8
    finish(manager, ports, asked)


def test_higher_priority_does_not_wait_for_long_lower_priority_prompts() -> None:
    manager, ports = make_manager(engine_info(max_running=8, max_step_tokens=8, num_pages=400, max_model_len=512))
    asked = {rid: ([rid] * 400, params(priority=5, max_tokens=4)) for rid in range(4)}
    fill(manager, ports, *(submit(rid, *one) for rid, one in asked.items()), turns=4)
    asked[99] = [9, 8, 7], params(max_tokens=8)
    ports.inbox.append(submit(99, *asked[99]))
    assert turns_until_first_token(manager, ports, 99) <= SOON
    finish(manager, ports, asked)


def test_preempted_lower_priority_samples_keep_computed_pages() -> None:
    manager, ports = make_manager(engine_info(max_running=4, num_pages=400))
    low = {rid: ([1, 2, 3, 4, rid], params(priority=5)) for rid in range(4)}
    fill(manager, ports, *(submit(rid, *one) for rid, one in low.items()), turns=20)
    high = {rid: ([9, rid], params(max_tokens=4)) for rid in range(90, 94)}
    fill(manager, ports, *(submit(rid, *one) for rid, one in high.items()), turns=0)
    computed = manager.scheduler.computed_tokens
    finish(manager, ports, {**low, **high})
    wanted = 4 * (5 + 40) + 4 * (2 + 4)
    again = manager.scheduler.computed_tokens - computed - (wanted - computed)
    assert manager.reclaimer.preemptions == 4
    assert again <= 4 * manager.table.page_size + 8  # the last page of each, and tokens in flight at its preemption


@pytest.mark.parametrize("tenants", ["AB", "AA"])
def test_a_huge_request_does_not_keep_all_slots(tenants: str) -> None:
    clock = Clock()
    manager, ports = make_manager(engine_info(max_running=8, num_pages=4000, max_model_len=1024), clock=clock)
    asked = {0: ([1, 2, 3], params(n=20, max_tokens=100)), 1: ([5, 6], params(n=2, max_tokens=8))}
    fill(manager, ports, submit(0, *asked[0], tenants[0]))
    assert running(manager, 0) == 8
    fill(manager, ports, submit(1, *asked[1], tenants[1]))
    assert not running(manager, 1)
    clock.tick = QUANTUM / 4
    assert turns_until_first_token(manager, ports, 1) <= SOON * 2
    finish(manager, ports, asked)


@pytest.mark.parametrize("tenants", ["AB", "AA"])
def test_long_prompts_do_not_monopolize_steps(tenants: str) -> None:
    info = engine_info(max_running=8, max_step_tokens=8, num_pages=400, max_model_len=512)
    manager, ports = make_manager(info, clock=Clock(QUANTUM / 4))
    asked = {rid: ([rid] * 400, params(max_tokens=4, n=2)) for rid in range(4)}
    fill(manager, ports, *(submit(rid, *one, tenants[0]) for rid, one in asked.items()), turns=4)
    asked[99] = [9, 8, 7], params(max_tokens=8)
    ports.inbox.append(submit(99, *asked[99], tenants[1]))
    assert turns_until_first_token(manager, ports, 99) <= SOON * 2
    finish(manager, ports, asked)


def test_callers_reach_equal_slot_shares_without_repeated_preemption() -> None:
    clock = Clock(QUANTUM / 4)
    manager, ports = make_manager(engine_info(max_running=12, num_pages=8000, max_model_len=2048), clock=clock)
    every = [(0, "A", 64), (1, "B", 64), (2, "C", 2)]
    asked = {rid: ([rid, 2, 3], params(n=n, max_tokens=1000)) for rid, _, n in every}
    fill(manager, ports, submit(0, *asked[0], "A"), turns=30)
    assert running(manager, 0) == 12
    fill(manager, ports, *(submit(rid, *asked[rid], name) for rid, name, _ in every[1:]), turns=700)
    assert [running(manager, rid) for rid in range(3)] == [5, 5, 2]
    preemptions = manager.reclaimer.preemptions
    assert preemptions == 7
    fill(manager, ports, turns=100)
    assert manager.reclaimer.preemptions == preemptions


def test_free_slots_go_to_the_caller_with_the_fewest_running() -> None:
    manager, ports = make_manager(engine_info(max_running=8, num_pages=4000))
    asked = {rid: ([1, 2, rid], params(max_tokens=6)) for rid in range(48)}
    fill(manager, ports, *(submit(rid, *asked[rid], "A" if rid < 40 else "B") for rid in asked), turns=2)
    tenants = [one.tenant for one in manager.table.requests if one is not None]
    assert sorted(tenants) == ["A"] * 4 + ["B"] * 4
    finish(manager, ports, asked)


def test_many_requests_of_one_caller_are_served_in_order_of_arrival() -> None:
    """Many samples of few prompts share more than few samples of many, so no later request is let in between."""
    manager, ports = make_manager(
        engine_info(max_running=2 * MAX_SHARING_REQUESTS, max_step_tokens=512, num_pages=4000), clock=Clock(QUANTUM)
    )
    asked = {rid: ([1, rid % 50, rid // 50], params(n=2, max_tokens=20)) for rid in range(4 * MAX_SHARING_REQUESTS)}
    fill(manager, ports, *(submit(rid, *one) for rid, one in asked.items()), turns=15)
    held = {int(rid) for rid in manager.table.rid[manager.table.state == State.DECODE]}
    assert held == set(range(MAX_SHARING_REQUESTS))
    finish(manager, ports, asked)
    assert not manager.reclaimer.preemptions


def test_fair_share_preemption_recomputes_a_small_share_of_tokens() -> None:
    clock = Clock(QUANTUM / 4)
    info = engine_info(max_running=64, max_step_tokens=256, num_pages=20_000, max_model_len=1024)
    manager, ports = make_manager(info, clock=clock)
    for rid, name in enumerate("AAAABBBBCC"):
        ports.inbox.append(submit(rid, [rid, 2, 3], params(n=20, max_tokens=80), name))
    drive(manager, ports, {5: [submit(20, [1], params(max_tokens=30), "D")]})
    tokens, _ = collect(ports.reports)
    whole = sum(map(len, tokens.values()))
    assert manager.reclaimer.preemptions
    assert manager.scheduler.computed_tokens <= whole * (1 + 2 * MAX_LOST_SHARE) + 64 * manager.table.page_size


@dataclass
class Asked:
    """One request and the turn of its arrival."""

    turn: int
    prompt: list[int]
    params: SamplingParams
    tenant: str


@dataclass
class Mixed:
    """Sizes of an engine, and requests of several classes and callers."""

    info: EngineInfo
    requests: list[Asked]
    run_ahead: int
    pp: int
    tick: float


@st.composite
def mixtures(draw: st.DrawFn) -> Mixed:
    page_size = draw(st.sampled_from([1, 4, 16]))
    max_running = draw(st.integers(1, 8))
    requests = []
    for _ in range(draw(st.integers(2, 10))):
        prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=30))
        one = params(
            n=draw(st.sampled_from([1, 1, 2, 7, 30])),
            max_tokens=draw(st.integers(1, 64 - len(prompt))),
            ignore_eos=draw(st.booleans()),
            priority=draw(st.sampled_from([0, 0, 1, 7])),
        )
        requests.append(Asked(draw(st.integers(0, 40)), prompt, one, draw(st.sampled_from(["", "A", "A", "B"]))))
    info = engine_info(
        page_size=page_size,
        num_pages=-(-64 // page_size) * draw(st.integers(1, 5)),
        max_running=max_running,
        max_step_tokens=max_running + draw(st.sampled_from([0, 1, 20])),
    )
    pp = draw(st.sampled_from([1, 1, 2, 3]))
    return Mixed(info, requests, draw(st.integers(1, 3 * pp)), pp, draw(st.sampled_from([0.0, 0.01, 0.1, 0.3])))


@settings(max_examples=15)
@given(mixtures())
def test_random_priorities_and_callers_give_right_tokens_and_no_starvation(mixed: Mixed) -> None:
    manager, ports = make_manager(mixed.info, mixed.run_ahead, pp=mixed.pp, clock=Clock(mixed.tick))
    messages: dict[int, list[ToManager]] = {}
    for rid, one in enumerate(mixed.requests):
        messages.setdefault(one.turn, []).append(submit(rid, one.prompt, one.params, one.tenant))
    passed_over = 0
    longest = 3 * (mixed.run_ahead + mixed.pp) + 6

    def no_lower_class_keeps_a_higher_one_waiting() -> bool:
        nonlocal passed_over
        table, first = manager.table, manager.scheduler.waiting.min_waiting_priority
        classes = table.priority[np.isin(table.state, (State.PREFILL, State.DECODE))]
        passed_over = passed_over + 1 if first is not None and len(classes) and first < classes.min() else 0
        assert passed_over <= longest
        return False

    drive(manager, ports, messages, no_lower_class_keeps_a_higher_one_waiting)
    tokens, _ = collect(ports.reports)
    for rid, one in enumerate(mixed.requests):
        for sample in range(one.params.n):
            assert tokens[rid, sample] == expected(one.prompt, sample, one.params)
    assert_all_given_back(manager)
