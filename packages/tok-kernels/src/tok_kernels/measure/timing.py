"""Time work on the device and on the host separately."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

_HOST_ROUNDS, _DEVICE_ROUNDS = 5, 15
_LEAD_CYCLES = 2_000_000  # of the device, about a millisecond, in which the host queues work


@dataclass(frozen=True, slots=True)
class TimedWork:
    """Work to be timed: `first` plans and launches, as in a first layer; `again` only launches, as in later layers."""

    name: str
    first: Callable[[], object]
    again: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds on the device, on the host to launch, and on the host to plan once a step."""

    device_ms: float
    host_ms: float
    plan_ms: float

    def per_layer(self, layers: int, hidden: bool, others_ms: float = 0.0) -> float:
        """Return the time per layer if steps are launched ahead: the longer of device time and host time.

        Host time may be `hidden` in a CUDA graph or behind other work of the device. If it is not, it includes
        `others_ms`, the time to launch the other kernels of the layer, which a CUDA graph cannot capture either.
        """
        return self.device_ms if hidden else max(self.device_ms, self.host_ms + self.plan_ms / layers + others_ms)


Timer = Callable[[TimedWork], Timing]


def cuda_timer(work: TimedWork) -> Timing:
    """Return median times of the work on the current CUDA device, after a warm-up."""
    for run in (work.first, work.again, work.again):
        run()
    first, again = _host_ms(work.first), _host_ms(work.again)
    return Timing(device_ms(work.again), again, max(first - again, 0.0))


def device_ms(run: Callable[[], object]) -> float:
    """Return the median milliseconds of `run` on the device, which sleeps before each round until it is queued."""
    pairs = [(_event(), _event()) for _ in range(_DEVICE_ROUNDS)]
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
    """Return the median milliseconds until `run` returns, each time from an idle device."""
    times = []
    for _ in range(_HOST_ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return median(times) * 1e3
