"""Time work on the device and on the host separately."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

_HOST_ROUNDS, _DEVICE_ROUNDS = 5, 15
_SLEEP_CYCLES = 2_000_000  # about a millisecond of the device, in which the host queues the work


@dataclass(frozen=True, slots=True)
class TimedWork:
    """Work to be timed: `plan_and_run` as in the first layer of a step, and `run` as in the later layers."""

    name: str
    plan_and_run: Callable[[], object]
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds on the device, on the host per launch, and on the host per plan, which is made once a step."""

    device_ms: float
    host_ms: float
    plan_ms: float

    def per_layer(self, layers: int, hidden: bool, others_ms: float = 0.0) -> float:
        """Return the milliseconds per layer if steps are launched ahead: the longer of device time and host time.

        Host time does not count if it is `hidden` by a CUDA graph or by other work of the device. Otherwise it includes
        `others_ms`, the time to launch the layer's other kernels, since the step is then not captured in a CUDA graph.
        """
        return self.device_ms if hidden else max(self.device_ms, self.host_ms + self.plan_ms / layers + others_ms)


Timer = Callable[[TimedWork], Timing]


def cuda_timer(work: TimedWork) -> Timing:
    """Return median times of the work on the current CUDA device, after a warm-up."""
    for warm_up in (work.plan_and_run, work.run, work.run):
        warm_up()
    plan_and_run_ms, run_ms = _host_ms(work.plan_and_run), _host_ms(work.run)
    return Timing(device_ms(work.run), run_ms, max(plan_and_run_ms - run_ms, 0.0))


def device_ms(run: Callable[[], object]) -> float:
    """Return the median milliseconds of `run` on the device, without the host's launch time.

    The device sleeps before each round, until the host has queued the round.
    """
    events = [(_event(), _event()) for _ in range(_DEVICE_ROUNDS)]
    for before, after in events:
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return float(median(before.elapsed_time(after) for before, after in events))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_ms(run: Callable[[], object]) -> float:
    """Return the median milliseconds until `run` returns; the device is idle at the start of each round."""
    times = []
    for _ in range(_HOST_ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return median(times) * 1e3
