"""Priority classes decide which requests start first and which are preempted; all requests complete."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.schedules import (
    assert_all_given_back,
    drive,
    engine_info,
    expected,
    make_manager,
    submit,
    watch_preemptions,
)
from support.simulated_worker import collect
from tok_core import InvalidField, SamplingParams
from tok_core.manager.kv_cache.preemption import LeastWorkLost
from tok_core.manager.loop import Manager
from tok_core.manager.requests import Pending, Request, WaitingQueue
from tok_core.manager.sequences import State
from tok_core.messages import Progress


class QueueOrder(RuleBasedStateMachine):
    """The waiting queue behaves like a list that is searched for its first by class, arrival and sample."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[tuple[int, int, int]] = []
        self.taken: list[Pending] = []
        self.arrivals = 0

    @rule(priority=st.integers(-2, 2), samples=st.integers(1, 3))
    def arrive(self, priority: int, samples: int) -> None:
        params = SamplingParams(n=samples, priority=priority)
        request = Request(self.arrivals, np.array([1], np.int32), params, self.arrivals, 64)
        self.arrivals += 1
        self.queue.append(Pending(request, deque(range(samples)), request.prompt))
        self.waiting.append((priority, request.serial, 0))

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        pending = next(iter(self.queue))
        assert self.queue.take(pending)
        assert pending.order == min(self.waiting)
        self.waiting.remove(pending.order)
        self.taken.append(pending)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def return_some(self, data: st.DataObject) -> None:
        pending = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        if len(pending.samples) > 1:
            pending.samples.popleft()
        self.queue.put_back(pending)
        self.waiting.append(pending.order)

    @precondition(lambda self: self.arrivals)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.integers(0, self.arrivals - 1))
        self.queue.remove({rid})
        self.waiting = [one for one in self.waiting if one[1] != rid]

    @invariant()
    def is_in_order(self) -> None:
        assert [pending.order for pending in self.queue] == sorted(self.waiting)
        assert len(self.queue) == len(self.waiting)
        assert bool(self.queue) == bool(self.waiting)


TestQueueOrder = QueueOrder.TestCase


def first_tokens(reports: list[Progress]) -> list[int]:
    """Return request ids in the order of their first tokens."""
    return list(dict.fromkeys(rid for report in reports for rid in report.rid.tolist()))


def test_lower_priority_value_is_served_first_then_order_of_arrival() -> None:
    manager, ports = make_manager(engine_info(max_running=1))
    priorities = [0, 3, 0, -2, 3, -2, 0]
    params = [SamplingParams(max_tokens=2, ignore_eos=True, seed=1, priority=one) for one in priorities]
    drive(manager, ports, {0: [submit(rid, [1, 2, rid], one) for rid, one in enumerate(params)]})
    assert first_tokens(ports.reports) == [3, 5, 0, 2, 6, 1, 4]


def test_late_request_of_a_higher_class_overtakes_waiting_lower_ones() -> None:
    manager, ports = make_manager(engine_info(max_running=1))
    low, high = (SamplingParams(max_tokens=4, ignore_eos=True, seed=1, priority=one) for one in (1, 0))
    first = [submit(rid, [1, 2, rid], low) for rid in range(3)]
    drive(manager, ports, {0: first, 3: [submit(9, [5], high)]})
    assert first_tokens(ports.reports) == [0, 9, 1, 2]


def running(manager: Manager) -> np.ndarray:
    state = manager.table.state
    return np.flatnonzero((state == State.PREFILL) | (state == State.DECODE))


def start(prompts: list[list[int]], priorities: list[int], turns: int) -> Manager:
    """Return a manager that runs one request for each of `prompts`."""
    manager, ports = make_manager(engine_info(max_running=8, num_pages=256))
    for rid, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True)):
        ports.inbox.append(
            submit(rid, prompt, SamplingParams(max_tokens=30, ignore_eos=True, seed=1, priority=priority))
        )
    for _ in range(turns):
        manager.turn()
    assert len(running(manager)) == len(prompts)
    return manager


def victim(manager: Manager) -> int:
    return int(manager.table.rid[LeastWorkLost(manager.paging).choose(running(manager))])


def test_sample_that_loses_least_work_is_preempted() -> None:
    prompts = [[1] * 20, [2] * 9, [3] * 30]
    assert victim(start(prompts, [0, 0, 0], turns=4)) == 1
    assert victim(start([[1] * 9, [2] * 9, [3] * 9], [0, 0, 0], turns=4)) == 2


def test_preemption_does_not_count_shared_pages_as_lost_work() -> None:
    stem = [1, 2, 3, 0] * 6
    assert victim(start([[*stem, 1], [*stem, 2], [3] * 12], [0, 0, 0], turns=4)) == 1


def test_lower_priority_class_is_preempted_regardless_of_lost_work() -> None:
    assert victim(start([[1] * 30, [2] * 5, [3] * 5], [1, 0, -1], turns=4)) == 0


def test_preempted_sample_is_spared_while_a_younger_fresh_one_runs() -> None:
    manager = start([[1] * 20, [2] * 9, [3] * 30], [0, 0, 0], turns=4)
    table = manager.table
    table.preempted[table.rid == 1] = True
    assert victim(manager) == 0
    table.preempted[table.rid == 0] = True
    assert victim(manager) == 2
    table.preempted[table.rid == 2] = True
    assert victim(manager) == 1


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30), st.sampled_from([0, 0, 1])), min_size=2, max_size=10),
    st.integers(13, 20),
)
def test_every_priority_class_completes_with_too_little_memory(rows: list[tuple[int, int, int]], pages: int) -> None:
    manager, ports = make_manager(engine_info(max_running=6, num_pages=pages))
    watch_preemptions(manager)
    params = [SamplingParams(max_tokens=most, ignore_eos=True, seed=1, priority=one) for _, most, one in rows]
    prompts = [[rid % 4] * length for rid, (length, _, _) in enumerate(rows)]
    drive(manager, ports, {0: [submit(rid, prompt, params[rid]) for rid, prompt in enumerate(prompts)]})
    tokens, _ = collect(ports.reports)
    for rid, prompt in enumerate(prompts):
        assert tokens[rid, 0] == expected(prompt, 0, params[rid])
    assert_all_given_back(manager)


def test_requeued_sample_keeps_its_preempted_mark() -> None:
    # Early finishes teach the length model that few pages are enough; later samples run to their limit.
    manager, ports = make_manager(engine_info(max_running=6, num_pages=32))
    victims = watch_preemptions(manager)
    random, short = np.random.default_rng(3), SamplingParams(n=3, max_tokens=2, seed=1)
    long = SamplingParams(n=3, max_tokens=40, seed=1)
    for rid in range(60):
        ports.inbox.append(submit(rid, random.integers(0, 4, 12).tolist(), short if rid < 30 else long))
    drive(manager, ports, {})
    assert victims
    assert len(victims) == manager.reclaimer.preemptions


@pytest.mark.parametrize("priority", [1.5, "0", True, 1 << 63])
def test_priority_other_than_an_int64_is_rejected(priority: object) -> None:
    with pytest.raises(InvalidField, match="priority"):
        SamplingParams(priority=priority)  # type: ignore[arg-type]
