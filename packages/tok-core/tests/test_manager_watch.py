"""A worker that never answers is noticed, and cancelled requests leave the queue at once."""

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
    """A worker that takes steps and returns none."""

    def outputs(self) -> list[StepOutput]:
        return []


def test_a_worker_that_is_stuck_ends_the_manager_and_an_idle_one_does_not() -> None:
    now = 1000.0
    ports = Stuck(INFO, delay=1)
    manager = Manager(EngineConfig(model="m", step_timeout=60), INFO, ports, None, clock=lambda: now)
    manager.turn()
    now += 1e6
    manager.turn()
    ports.inbox.append(Submit(1, np.array([1, 2, 3], np.int32), SamplingParams(seed=1)))
    manager.turn()
    now += 59
    manager.turn()
    now -= 500  # a clock may step back
    manager.turn()
    now += 502
    with pytest.raises(EngineError, match="stuck"):
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
