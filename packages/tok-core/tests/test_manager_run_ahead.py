"""The manager queues enough steps ahead, and reports times and statistics when it should."""

from __future__ import annotations

import time

import numpy as np
import pytest

from support.schedules import drive, engine_info, make_manager, submit
from support.simulated_worker import SimulatedPorts
from tok_core import EngineConfig, InvalidField, SamplingParams
from tok_core.manager.loop import Manager
from tok_core.manager.reports import PATIENCE
from tok_core.manager.scheduling.steps_in_flight import MAX_QUEUED_STEPS, MIN_QUEUED_STEPS, RunAhead
from tok_core.messages import CommandResult, RebalanceExperts, TaskResult, WorkerTask


def after(fixed: int | None, *seconds: float) -> int:
    ahead = RunAhead(fixed)
    for one in seconds:
        ahead.observe(one)
    return ahead.steps


def test_run_ahead_starts_with_two_queued_steps() -> None:
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
def test_run_ahead_queues_three_milliseconds_beyond_the_running_step(seconds: float, steps: int) -> None:
    assert after(None, *[seconds] * 50) == steps


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(40e-3, 2), (6.1e-3, 2), (5.9e-3, 3), (2.9e-3, 4), (1.6e-3, 5), (0.1e-3, MAX_QUEUED_STEPS)],
)
def test_run_ahead_queues_six_milliseconds_of_steps_with_drafts(seconds: float, steps: int) -> None:
    ahead = RunAhead(None)
    ahead.drafts = True
    for _ in range(50):
        ahead.observe(seconds)
    assert ahead.steps == steps
    ahead.few = True
    assert ahead.steps == MIN_QUEUED_STEPS


def test_run_ahead_ignores_one_long_step_but_follows_many() -> None:
    assert after(None, *[1.1e-3] * 50) == 4
    assert after(None, *[1.1e-3] * 50, 4e-3) == 4
    assert after(None, *[1.1e-3] * 50, *[40e-3] * 20) == 2


@pytest.mark.parametrize("absurd", [3600.0, 1e9, -3600.0])
def test_run_ahead_is_robust_to_absurd_step_times(absurd: float) -> None:
    assert abs(after(None, *[1.1e-3] * 50, absurd) - 4) <= 1
    assert after(None, *[1.1e-3] * 50, absurd, *[1.1e-3] * 10) == 4


def test_configured_run_ahead_is_constant() -> None:
    assert after(5) == after(5, 1e-4, 1.0) == 5


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2"])
def test_run_ahead_rejects_values_other_than_positive_integers(wrong: object) -> None:
    with pytest.raises(InvalidField, match="run_ahead"):
        EngineConfig(model="m", run_ahead=wrong)  # type: ignore[arg-type]


class Quick(SimulatedPorts):
    """A worker with steps of half a millisecond, which are back once the manager has queued all it wants to."""

    def __init__(self) -> None:
        super().__init__(engine_info(), delay=100)
        self.longest = 0

    def wait(self, seconds: float) -> None:
        self.longest = max(self.longest, len(self.queued))
        for output in self.queued:
            output.device_seconds = 0.5e-3
        super().wait(seconds)


@pytest.mark.parametrize(("given", "queued"), [(None, 7), (3, 3)])
def test_manager_queues_as_many_steps_as_run_ahead_allows(given: int | None, queued: int) -> None:
    ports = Quick()
    manager = Manager(EngineConfig(model="m", run_ahead=given), ports.worker.info, ports, None)
    drive(manager, ports, {0: [submit(0, [1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True, seed=1))]})
    assert ports.longest == queued


class MovingExperts(SimulatedPorts):
    """Workers that move experts until the manager waits."""

    def __init__(self) -> None:
        super().__init__(engine_info(), delay=100)
        self.tasks = 0
        self.results: list[TaskResult] = []

    def answer(self, result: CommandResult) -> None:
        raise AssertionError("the engine has sent no command")

    def send_task(self, task: WorkerTask) -> int:
        assert isinstance(task, RebalanceExperts)
        self.tasks += 1
        self.results.append(TaskResult())
        return 1

    def task_results(self) -> list[TaskResult]:
        arrived = self.results if self.idle else []
        self.results = self.results[len(arrived) :]
        return arrived

    def wait(self, seconds: float) -> None:
        assert self.queued or self.results, "the manager waits, and nothing will come"
        super().wait(seconds)


def test_manager_sends_the_next_step_as_soon_as_experts_have_moved() -> None:
    ports = MovingExperts()
    config = EngineConfig(model="m", tp=2, ep=True, redundant_experts=2, expert_rebalance_steps=4)
    manager = Manager(config, ports.worker.info, ports, None, command_ports=ports)
    ports.inbox.append(submit(0, [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True, seed=1)))
    while ports.inbox or manager.intake.requests:
        if not manager.turn() and manager.intake.requests:
            ports.wait(0)
    assert ports.tasks > 3


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_reported_times_are_monotonic_and_ignore_clock_jumps(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_reported_times_add_up_and_alone_cause_no_report() -> None:
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
def test_statistics_are_reported_alone_only_when_tokens_are_late(pause: float) -> None:
    manager, ports = make_manager(engine_info(), run_ahead=2)
    ports.delay = 2  # the queue is full before anything comes back
    now, waits = 100.0, list[float]()

    def wait(seconds: float) -> None:
        nonlocal now
        if not ports.queued:
            raise Over
        now += pause
        waits.append(seconds)
        ports.idle = len(waits) % 2 == 0  # every other wait brings nothing

    manager.reporter._clock, ports.wait = lambda: now, wait  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=1)
    ports.inbox = [submit(0, [1, 2, 3], params)]
    with pytest.raises(Over):
        manager.run()
    alone = [not len(report.rid) for report in ports.reports]
    assert alone.count(False) == 9
    assert alone[0]  # reports that the request runs
    assert alone[-1]  # reports that the request no longer runs
    assert ports.reports[-1].stats == manager.stats()
    if pause:
        assert alone.count(True) > 4
        assert set(waits) == {PATIENCE, 1.0}
    else:
        assert alone.count(True) == 2
        assert waits[1:] == [PATIENCE] * len(waits[1:])
