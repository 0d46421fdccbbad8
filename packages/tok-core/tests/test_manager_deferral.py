"""What can wait is put off while the worker's queue runs low, never for long, and never when nobody runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.schedules import drive, engine_info, make_manager, submit
from tok_core import SamplingParams
from tok_core.manager.deferral import FEW, MOST, Deferral, runs_low


@pytest.mark.parametrize(
    ("queued", "wanted", "low"),
    [(0, 1, False), (0, 2, True), (1, 2, False), (3, 8, True), (4, 8, False), (7, 8, False)],
)
def test_a_queue_that_is_less_than_half_full_runs_low(queued: int, wanted: int, low: bool) -> None:
    assert runs_low(queued, wanted) is low


@given(st.lists(st.booleans()))
def test_no_more_than_a_few_steps_in_a_row_go_without_and_none_that_has_time(hurries: list[bool]) -> None:
    deferral, row = Deferral(), 0
    for hurried in hurries:
        off = deferral.puts_off(hurried=hurried, running=1000)
        row = row + 1 if off else 0
        assert row <= MOST
        assert off == (hurried and (row > 0))
        assert hurried or not off
    assert deferral.count <= sum(hurries)


def test_where_many_have_left_room_nothing_is_put_off() -> None:
    deferral = Deferral()
    assert deferral.puts_off(hurried=True, running=4 * FEW)
    deferral.has_left(3)
    assert deferral.puts_off(hurried=True, running=4 * FEW)
    deferral = Deferral()
    deferral.has_left(4)
    assert not deferral.puts_off(hurried=True, running=4 * FEW)
    assert deferral.puts_off(hurried=True, running=4 * FEW)


def test_the_search_for_samples_to_start_waits_while_decoders_can_be_served() -> None:
    manager, _ = make_manager(engine_info(max_running=4))
    scheduler, params = manager.scheduler, SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    manager._take(submit(0, [1, 2], params))
    first = scheduler.next_step(hurried=True)
    assert first is not None  # nobody runs: it does not wait
    assert first.prefill_slot.tolist() == [0]
    manager.returns.expect(first)
    manager._take(submit(1, [3, 4], params))
    started = []
    for _ in range(MOST + 1):
        step = scheduler.next_step(hurried=True)
        assert step is not None
        started.append(len(step.prefill_slot))
    assert started == [0] * MOST + [1]
    assert manager.stats().admissions_deferred == MOST


def test_a_worker_that_keeps_its_queue_full_puts_nothing_off() -> None:
    manager, ports = make_manager(engine_info(max_running=4), run_ahead=4)
    params = SamplingParams(n=3, max_tokens=12, seed=1)
    drive(manager, ports, {turn: [submit(turn, [1, turn], params)] for turn in range(0, 40, 4)})
    deferred = manager.stats().admissions_deferred
    assert deferred <= 3 * 10  # only while the queue fills at the beginning, or after a pause
