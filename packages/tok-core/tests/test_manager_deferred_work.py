"""Optional work is deferred while the worker's queue runs low: for few steps, and only while sequences run."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.schedules import check, drive, engine_info, hurry, make_manager, submit
from support.simulated_worker import SimulatedPorts
from tok_core import SamplingParams
from tok_core.manager.batch.deferred_work import BOUNDS, WORK, DeferredWork, WorkKind, runs_low
from tok_core.manager.loop import Manager
from tok_core.messages import Cancel, StepInput, Submit

FOR_EVER = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
PROMPT = list(range(9))


@pytest.mark.parametrize(
    ("queued", "wanted", "low"),
    [(0, 1, False), (0, 2, True), (1, 2, False), (3, 8, True), (4, 8, False), (7, 8, False)],
)
def test_a_queue_that_is_less_than_half_full_runs_low(queued: int, wanted: int, low: bool) -> None:
    assert runs_low(queued, wanted) is low


@given(st.sampled_from(WORK), st.lists(st.booleans()))
def test_work_is_deferred_for_limited_steps_and_only_with_a_low_queue(work: WorkKind, hurries: list[bool]) -> None:
    deferred, row, count = DeferredWork(), 0, 0
    for queue_low in hurries:
        off = deferred.defers(work, queue_low=queue_low, running=1000)
        assert off == (queue_low and row < BOUNDS[work].steps)
        row = row + 1 if off else 0
        count += off
    assert deferred.counts == {**dict.fromkeys(WORK, 0), work: count}


@pytest.mark.parametrize("work", WORK)
def test_work_that_concerns_many_sequences_is_not_deferred(work: WorkKind) -> None:
    deferred, running = DeferredWork(), 4 * BOUNDS[work].few
    assert deferred.defers(work, queue_low=True, running=running)
    deferred.concern(3, work)
    assert deferred.defers(work, queue_low=True, running=running)
    deferred.concern(1, work)
    assert not deferred.defers(work, queue_low=True, running=running)
    assert deferred.defers(work, queue_low=True, running=running)
    assert not deferred.defers(work, queue_low=True, running=0)


def full_engine(samples: int, run_ahead: int = 2) -> tuple[Manager, SimulatedPorts]:
    """Return a manager whose `samples` requests share a prefix and all decode, with its step queue full."""
    sizes = {"max_running": samples + 8, "max_model_len": 256, "num_pages": 65 * (samples + 8)}
    manager, ports = make_manager(engine_info(**sizes, max_step_tokens=2000), run_ahead)
    requests = [submit(rid, [*PROMPT, rid], FOR_EVER) for rid in range(samples)]
    drive(manager, ports, {0: requests}, lambda: manager.scheduler.steps == 4)
    assert manager.table.sequences_running == samples
    return manager, ports


def steps_after(manager: Manager, message: Submit | Cancel, count: int) -> list[StepInput]:
    """Return the next `count` steps after `message`, all built while the queue is low."""
    manager._take(message)
    found = []
    for _ in range(count):
        step = manager.scheduler.next_step(queue_low=True)
        assert step is not None
        manager.output_processor.expect(step)
        check(manager)
        found.append(step)
    return found


def grouped(step: StepInput) -> int:
    return sum(int(level.count.sum()) for level in step.levels[:1])


def test_admission_is_deferred_while_running_sequences_decode() -> None:
    manager, _ = make_manager(engine_info(max_running=4))
    manager._take(submit(0, [1, 2], FOR_EVER))
    first = manager.scheduler.next_step(queue_low=True)
    assert first is not None  # no sequence runs, so admission is not deferred
    assert first.prefill_slot.tolist() == [0]
    manager.output_processor.expect(first)
    most = BOUNDS["admission"].steps
    started = [len(step.prefill_slot) for step in steps_after(manager, submit(1, [3, 4], FOR_EVER), most + 1)]
    assert started == [0] * most + [1]
    assert manager.stats().deferred_admission == most


def test_forecast_update_is_deferred_until_its_limit() -> None:
    manager, _ = full_engine(40)
    followed, searches = manager.table.followed.copy(), 0
    manager._take(submit(99, PROMPT, FOR_EVER))
    while searches < BOUNDS["forecast"].steps:
        searches += manager.scheduler._catch_up(0, queue_low=True, running=40)
        assert (manager.table.followed == followed).all()
    assert manager.stats().deferred_forecast == searches
    while not manager.scheduler._catch_up(0, queue_low=True, running=40):
        pass
    assert (manager.table.followed[:40] == manager.table.known[:40] - manager.table.prompt_len[:40]).all()
    assert (manager.table.followed != followed).any()


def test_deferred_regrouping_drops_ended_rows_from_kept_groups() -> None:
    manager, _ = full_engine(40)
    most = BOUNDS["regrouping"].steps
    manager._take(Cancel(7))
    kept = steps_after(manager, Cancel(9), most + 1)
    assert [len(step.decode_slot) for step in kept] == [grouped(step) for step in kept] == [38] * (most + 1)
    assert manager.stats().deferred_regrouping == most


def test_deferred_regrouping_leaves_new_rows_ungrouped_until_it_runs() -> None:
    manager, _ = full_engine(40)
    grown = steps_after(manager, submit(99, [*PROMPT, 99], FOR_EVER), BOUNDS["admission"].steps + 1)
    assert len(grown[-1].prefill_slot) == 1
    late = manager.scheduler.next_step(queue_low=True)
    assert late is not None
    assert (len(late.decode_slot), grouped(late)) == (41, 40)
    assert late.decode_slot[-1] == grown[-1].prefill_slot[0]
    soon = manager.scheduler.next_step(queue_low=False)
    assert soon is not None
    assert (len(soon.decode_slot), grouped(soon)) == (41, 41)


def test_pages_of_ended_sequences_are_released_at_the_deferral_limit() -> None:
    manager, _ = full_engine(70)
    free, most = manager.paging.available, BOUNDS["cache"].steps
    manager._take(Cancel(7))
    for _ in range(most):
        assert manager.scheduler.next_step(queue_low=True) is not None
        assert (manager.table.ended, manager.paging.available) == (1, free)
        assert (manager.stats().sequences_running, manager.stats().requests_running) == (69, 69)
    assert manager.scheduler.next_step(queue_low=True) is not None
    assert manager.table.ended == 0
    assert manager.paging.available > free
    assert manager.stats().deferred_cache == most


def test_ended_sequences_are_released_when_queue_is_full_or_many_ended() -> None:
    manager, _ = full_engine(70)
    hurry(manager, repeat(True))
    manager._take(Cancel(7))
    while manager._send_step() is not None:
        assert manager.table.ended == 1
    assert len(manager.output_processor.in_flight) == 2
    assert manager.table.ended == 0
    for rid in (10, 20):
        manager._take(Cancel(rid))
    assert manager.scheduler.next_step(queue_low=True) is not None
    assert manager.table.ended == 0


def test_page_shortage_releases_ended_sequences_before_evicting_cache() -> None:
    manager, _ = full_engine(70)
    cached = manager.paging.tree.pages
    manager._take(Cancel(7))
    everything = manager.paging.allocator.allocate(manager.paging.allocator.free)
    manager.table.length[:70] = manager.table.num_pages[:70] * 4  # all have filled their last page
    manager.table.known[:70] = manager.table.length[:70]
    manager.paging.allocator.release(everything[:69])
    assert manager.scheduler.next_step(queue_low=True) is not None
    assert manager.table.ended == 1
    assert manager.paging.tree.pages == cached
    manager.table.length[:70] = manager.table.num_pages[:70] * 4
    manager.table.known[:70] = manager.table.length[:70]
    manager.paging.allocator.release(everything[69:137])
    assert manager.scheduler.next_step(queue_low=True) is not None
    assert manager.table.ended == 0


def test_reports_repeat_old_statistics_while_statistics_are_deferred() -> None:
    manager, ports = full_engine(40, run_ahead=1)
    most = BOUNDS["statistics"].steps
    told = len(ports.reports)
    hurry(manager, repeat(True))
    while len(ports.reports) < told + most + 1:
        if not manager.turn():
            ports.wait(0)
    tokens = [report.stats.output_tokens for report in ports.reports[told - 1 :]]
    assert tokens == [tokens[0]] * (most + 1) + [tokens[0] + 40 * (most + 1)]
    hurry(manager, repeat(False))
    while len(ports.reports) < told + most + 3:
        if not manager.turn():
            ports.wait(0)
    assert np.diff([report.stats.output_tokens for report in ports.reports[-3:]]).tolist() == [40, 40]
    assert manager.stats().deferred_statistics == most


def test_idle_manager_reports_its_deferred_statistics() -> None:
    manager, ports = make_manager(engine_info())
    hurry(manager, repeat(True))
    manager.scheduler.deferred.concern(-10_000, "statistics")  # statistics may wait, however many samples end
    drive(manager, ports, {0: [submit(0, [1, 2, 3], SamplingParams(max_tokens=5, seed=1, ignore_eos=True))]})
    assert ports.reports[-1].stats.requests_finished == 0
    manager._report_if_changed()
    assert ports.reports[-1].stats == manager.stats()
    assert ports.reports[-1].stats.requests_finished == 1


def test_full_step_queue_defers_almost_no_work() -> None:
    manager, ports = make_manager(engine_info(max_running=4), run_ahead=4)
    params = SamplingParams(n=3, max_tokens=12, seed=1)
    drive(manager, ports, {turn: [submit(turn, [1, turn], params)] for turn in range(0, 40, 4)})
    # Work is deferred only while the queue fills, at the beginning or after a pause.
    assert all(count <= 3 * 10 for count in manager.scheduler.deferred.counts.values())
