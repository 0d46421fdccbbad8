"""The time of a piece of work on the device and on the host, kept apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

_HOST_ROUNDS, _DEVICE_ROUNDS = 5, 15
_LEAD_CYCLES = 2_000_000  # about a millisecond, in which the host gets ahead of the device


@dataclass(frozen=True, slots=True)
class TimedWork:
    """What is timed: `first` plans and launches, as in the first layer of a step; `again` launches, as in the next."""

    name: str
    first: Callable[[], object]
    again: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds: on the device; on the host to launch; on the host to plan, once a step."""

    device_ms: float
    host_ms: float
    plan_ms: float

    def per_layer(self, layers: int, hidden: bool, others_ms: float = 0.0) -> float:
        """What one of `layers` takes where steps are launched ahead: the longer of device and host.

        What the host does may be `hidden`, in a CUDA graph or behind other work of the device; what is not may keep
        others from being captured in a graph, which take the host `others_ms` a layer.
        """
        return self.device_ms if hidden else max(self.device_ms, self.host_ms + self.plan_ms / layers + others_ms)


Timer = Callable[[TimedWork], Timing]


def cuda_timer(work: TimedWork) -> Timing:
    """Medians, on the current CUDA device, of work that is warm and whose inputs mostly are not in its caches."""
    for run in (work.first, work.again, work.again):
        run()
    first, again = _host_ms(work.first), _host_ms(work.again)
    return Timing(device_ms(work.again), again, max(first - again, 0.0))


def device_ms(run: Callable[[], object], rounds: int = _DEVICE_ROUNDS) -> float:
    """Median milliseconds between the events around `run`, all of it queued before the device begins."""
    pairs = [(_event(), _event()) for _ in range(rounds)]
    for before, after in pairs:
        torch.cuda._sleep(_LEAD_CYCLES)  # type: ignore[no-untyped-call]
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return float(median(before.elapsed_time(after) for before, after in pairs))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_ms(run: Callable[[], object]) -> float:
    """Median milliseconds until `run` returns, the device being idle when it begins."""
    times = []
    for _ in range(_HOST_ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return median(times) * 1e3
