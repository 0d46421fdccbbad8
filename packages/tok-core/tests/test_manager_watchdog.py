"""A worker that never answers is noticed, whatever the clock does, and cancelled requests leave the queue at once."""

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
    """A worker that takes steps, and returns some only once it `answers`."""

    answers = False

    def outputs(self) -> list[StepOutput]:
        return super().outputs() if self.answers else []


HOUR = 3600.0


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def turns(self, manager: Manager, seconds: int) -> None:
        """A turn of the manager's loop every second."""
        for _ in range(seconds):
            self.now += 1
            manager.turn()


def owing_manager(timeout: float) -> tuple[Manager, Clock, Stuck]:
    """Its worker has been given all steps that it may be, and says nothing."""
    clock, ports = Clock(), Stuck(INFO, delay=1)
    manager = Manager(EngineConfig(model="m", step_timeout=timeout), INFO, ports, None, clock=clock)
    ports.inbox.append(Submit(1, np.array([1, 2, 3], np.int32), SamplingParams(seed=1)))
    while manager.turn():
        pass
    return manager, clock, ports


def test_a_worker_that_is_stuck_ends_the_manager() -> None:
    manager, clock, _ = owing_manager(60)
    clock.turns(manager, 60)
    with pytest.raises(EngineError, match="60 s: the worker is stuck"):
        clock.turns(manager, 1)


def test_a_worker_that_owes_nothing_is_never_stuck() -> None:
    ports, clock = Stuck(INFO, delay=1), Clock()
    clock.turns(Manager(EngineConfig(model="m", step_timeout=60), INFO, ports, None, clock=clock), 1000)


@pytest.mark.parametrize("timeout", [0.1, 1.0, 60.0, 2 * HOUR])
@pytest.mark.parametrize("jump", [HOUR, -HOUR, 24 * HOUR])
def test_a_clock_that_jumps_is_no_reason_to_call_a_worker_stuck(jump: float, timeout: float) -> None:
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


def test_after_a_jump_a_worker_that_is_stuck_is_found_out_nevertheless() -> None:
    for jump in (HOUR, -HOUR):
        manager, clock, _ = owing_manager(60)
        clock.now += jump
        manager.turn()
        with pytest.raises(EngineError, match="stuck"):
            clock.turns(manager, 61)


def test_a_clock_that_stands_still_ends_nothing() -> None:
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
    assert not manager.requests
    assert not manager.scheduler.waiting
    assert manager.table.free_slots == 2
    assert manager.paging.used == 0
