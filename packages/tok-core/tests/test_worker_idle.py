"""A worker captures missing CUDA graphs while it waits for steps, unless the device still computes one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tok_core.config import RankCoordinates
from tok_core.replicas.processes import worker_process
from tok_core.worker.runner import TimingEvent


class NoMoreSteps(Exception):
    pass


def test_worker_captures_graphs_only_once_the_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, captured = iter([False, False, True, False, True]), list[int]()

    class WaitingRunner:
        turn = -1
        is_idle = False
        graphs = SimpleNamespace(missing=5, capture_missing=lambda: captured.append(WaitingRunner.turn))

    def wait(seconds: float) -> None:
        assert seconds == worker_process.IDLE_SECONDS
        WaitingRunner.turn += 1
        try:
            WaitingRunner.is_idle = next(turns)
        except StopIteration:
            raise NoMoreSteps from None

    for name, value in (("set_up", lambda *_: (WaitingRunner, None)), ("Sender", lambda *_: None)):
        monkeypatch.setattr(worker_process, name, value)
    monkeypatch.setattr(worker_process, "freeze_gc_heap", lambda: None)
    launch = SimpleNamespace(config=None, replica=0, rendezvous="", device="cpu", workers_on_host=1, outputs="")
    with pytest.raises(NoMoreSteps):
        worker_process.run_worker(
            cast("Any", None), cast("Any", launch), RankCoordinates(), cast("Any", SimpleNamespace(wait=wait))
        )
    assert captured == [2, 4]


@pytest.mark.gpu
def test_device_is_idle_once_it_has_finished_its_work() -> None:
    device = torch.device("cuda")
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # about 0.1 s
    event = TimingEvent(device)
    assert not event.is_reached()
    event.wait()
    assert event.is_reached()


def test_point_on_a_cpu_is_reached_at_once() -> None:
    assert TimingEvent(torch.device("cpu")).is_reached()
