"""How many steps are queued ahead, and what time the manager says it took."""

from __future__ import annotations

import time

import numpy as np
import pytest

from support.schedules import drive, engine_info, make_manager, submit
from support.simulated_worker import SimulatedPorts
from tok_core import EngineConfig, InvalidField, SamplingParams
from tok_core.manager.batch.run_ahead import MAX_QUEUED_STEPS, MIN_QUEUED_STEPS, RunAhead
from tok_core.manager.loop import PATIENCE, Manager


def after(fixed: int | None, *seconds: float) -> int:
    ahead = RunAhead(fixed)
    for one in seconds:
        ahead.observe(one)
    return ahead.steps


def test_two_steps_are_queued_before_any_has_come_back() -> None:
    assert after(None) == MIN_QUEUED_STEPS == 2


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        (40e-3, 2),
        (3.1e-3, 2),
        (2.9e-3, 3),
        (1.4e-3, 4),
        (0.8e-3, 5),
        (0.1e-3, MAX_QUEUED_STEPS),
        (0.0, MAX_QUEUED_STEPS),
    ],
)
def test_queued_steps_last_three_milliseconds_beside_the_one_under_way(seconds: float, steps: int) -> None:
    assert after(None, *[seconds] * 50) == steps


def test_one_long_step_among_short_ones_changes_little_and_many_do() -> None:
    assert after(None, *[1.1e-3] * 50) == 4
    assert after(None, *[1.1e-3] * 50, 4e-3) == 4
    assert after(None, *[1.1e-3] * 50, *[40e-3] * 20) == 2


@pytest.mark.parametrize("absurd", [3600.0, 1e9, -3600.0])
def test_a_step_that_seems_to_have_taken_an_hour_or_less_than_nothing_is_one_step_among_many(absurd: float) -> None:
    assert abs(after(None, *[1.1e-3] * 50, absurd) - 4) <= 1
    assert after(None, *[1.1e-3] * 50, absurd, *[1.1e-3] * 10) == 4


def test_a_number_given_stays() -> None:
    assert after(5) == after(5, 1e-4, 1.0) == 5


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2"])
def test_other_than_whole_numbers_of_steps_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidField, match="run_ahead"):
        EngineConfig(model="m", run_ahead=wrong)  # type: ignore[arg-type]


class Quick(SimulatedPorts):
    """A worker whose steps last half a millisecond and are back when the manager has queued all it wants to."""

    def __init__(self) -> None:
        super().__init__(engine_info(), delay=100)
        self.longest = 0

    def wait(self, seconds: float) -> None:
        self.longest = max(self.longest, len(self.queued))
        for output in self.queued:
            output.device_seconds = 0.5e-3
        super().wait(seconds)


@pytest.mark.parametrize(("given", "queued"), [(None, 7), (3, 3)])
def test_the_manager_queues_so_many_steps(given: int | None, queued: int) -> None:
    ports = Quick()
    manager = Manager(EngineConfig(model="m", run_ahead=given), ports.worker.info, ports, None)
    drive(manager, ports, {0: [submit(0, [1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True, seed=1))]})
    assert ports.longest == queued


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_no_time_that_is_told_goes_back_or_counts_a_jump_of_the_clock(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, real = [0.0], (time.perf_counter, time.monotonic)
    for name, clock in zip(("perf_counter", "monotonic"), real, strict=True):
        monkeypatch.setattr(time, name, lambda clock=clock: clock() + now[0])
    manager, ports = make_manager(engine_info())
    ports.inbox.append(submit(0, [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True, seed=1)))
    while manager.turn() or ports.queued:
        now[0] += jump
        ports.wait(0)
        for output in ports.queued:
            output.launch_seconds += jump
            output.device_seconds += jump
    times = [
        [getattr(report.stats, f"{part}_seconds") for part in ("schedule", "launch", "device", "output")]
        for report in ports.reports
    ]
    assert len(times) >= 20
    assert (np.diff(times, axis=0) >= 0).all()
    assert np.max(times) < 60
    assert times[-1][1:3] == [0, 0]


def test_times_add_up_and_are_no_reason_to_report() -> None:
    manager, ports = make_manager(engine_info(), run_ahead=1)
    drive(manager, ports, {0: [submit(0, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True, seed=1))]})
    manager._report_if_changed()
    reports = len(ports.reports)
    manager.turn()
    manager._report_if_changed()
    assert len(ports.reports) == reports
    stats = manager.stats()
    assert stats.steps == 5
    assert stats.launch_seconds == 5 * 0.25
    assert stats.device_seconds == 5 * 0.5
    assert stats.schedule_seconds > 0
    assert stats.output_seconds > 0


class Over(Exception):
    """Nothing is left to do."""


@pytest.mark.parametrize("pause", [0.0, 2 * PATIENCE, -2 * PATIENCE])
def test_figures_go_with_tokens_unless_these_are_long_in_coming(pause: float) -> None:
    manager, ports = make_manager(engine_info(), run_ahead=2)
    ports.delay = 2  # the queue is full before anything comes back
    now, waits = 100.0, list[float]()

    def wait(seconds: float) -> None:
        nonlocal now
        if not ports.queued:
            raise Over
        now += pause
        waits.append(seconds)
        ports.idle = len(waits) % 2 == 0  # every other time nothing has come

    manager._clock, ports.wait = lambda: now, wait  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=1)
    ports.inbox = [submit(0, [1, 2, 3], params)]
    with pytest.raises(Over):
        manager.run()
    alone = [not len(report.rid) for report in ports.reports]
    assert alone.count(False) == 9
    assert alone[0]  # that the request runs
    assert alone[-1]  # that it does no more
    assert ports.reports[-1].stats == manager.stats()
    if pause:
        assert alone.count(True) > 4
        assert set(waits) == {PATIENCE, 1.0}
    else:
        assert alone.count(True) == 2
        assert waits[1:] == [PATIENCE] * len(waits[1:])
