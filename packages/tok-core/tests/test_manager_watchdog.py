"""The watchdog detects a stuck worker despite clock jumps; cancelled requests leave the queue at once."""

from __future__ import annotations

import numpy as np
import pytest

from support.simulated_worker import SimulatedPorts
from tok_core import EngineConfig, EngineError, SamplingParams
from tok_core.manager.loop import Manager
from tok_core.messages import Cancel, EngineInfo, StepOutput, Submit

INFO = EngineInfo(
    vocab_size=50,
    eos_token_ids=(7,),
    max_model_len=64,
    num_pages=64,
    page_size=4,
    max_running=2,
    max_step_tokens=16,
    device="cpu",
    dtype="float32",
    backend="simulated",
)


class Stuck(SimulatedPorts):
    """A worker that takes steps and returns outputs only while `answers` is set."""

    answers = False

    def outputs(self) -> list[StepOutput]:
        return super().outputs() if self.answers else []


HOUR = 3600.0


class Clock:
    """A clock that stands still until `now` is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def turns(self, manager: Manager, seconds: int) -> None:
        """Run one turn of the manager's loop per second."""
        for _ in range(seconds):
            self.now += 1
            manager.turn()


def owing_manager(timeout: float) -> tuple[Manager, Clock, Stuck]:
    """Return a manager whose worker has a full queue of steps and returns none."""
    clock, ports = Clock(), Stuck(INFO, delay=1)
    manager = Manager(EngineConfig(model="m", step_timeout=timeout), INFO, ports, None, clock=clock)
    ports.inbox.append(Submit(1, np.array([1, 2, 3], np.int32), SamplingParams(seed=1)))
    while manager.turn():
        pass
    return manager, clock, ports


def test_watchdog_ends_the_manager_of_a_stuck_worker() -> None:
    manager, clock, _ = owing_manager(60)
    clock.turns(manager, 60)
    with pytest.raises(EngineError, match="60 s: the worker is stuck"):
        clock.turns(manager, 1)


def test_watchdog_ignores_a_worker_without_queued_steps() -> None:
    ports, clock = Stuck(INFO, delay=1), Clock()
    clock.turns(Manager(EngineConfig(model="m", step_timeout=60), INFO, ports, None, clock=clock), 1000)


@pytest.mark.parametrize("timeout", [0.1, 1.0, 60.0, 2 * HOUR])
@pytest.mark.parametrize("jump", [HOUR, -HOUR, 24 * HOUR])
def test_watchdog_does_not_take_a_clock_jump_for_a_stuck_worker(jump: float, timeout: float) -> None:
    manager, clock, ports = owing_manager(timeout)
    clock.now += 0.4 * timeout
    manager.turn()
    clock.now += jump
    manager.turn()
    clock.now += jump
    manager.turn()
    ports.answers = True
    while manager.turn():
        pass
    ports.answers = False
    clock.now += jump
    manager.turn()


def test_watchdog_detects_a_stuck_worker_after_a_clock_jump() -> None:
    for jump in (HOUR, -HOUR):
        manager, clock, _ = owing_manager(60)
        clock.now += jump
        manager.turn()
        with pytest.raises(EngineError, match="stuck"):
            clock.turns(manager, 61)


def test_watchdog_ends_no_manager_while_the_clock_stands_still() -> None:
    manager, _, _ = owing_manager(1)
    for _ in range(1000):
        manager.turn()


def test_ten_thousand_cancelled_requests_leave_the_queue_together() -> None:
    ports = SimulatedPorts(INFO, delay=1)
    manager = Manager(EngineConfig(model="m"), INFO, ports, None)
    for rid in range(10_000):
        ports.inbox.append(Submit(rid, np.array([1, 2, 3], np.int32), SamplingParams(seed=1, max_tokens=50)))
    manager.turn()
    ports.inbox += [Cancel(rid) for rid in range(10_000)]
    manager.turn()
    assert not manager.intake.requests
    assert not manager.scheduler.waiting
    assert manager.table.free_slots == 2
    assert manager.paging.used == 0
