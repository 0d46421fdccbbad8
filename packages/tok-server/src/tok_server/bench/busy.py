"""Report from a Chrome-format trace which kernels took the device's time and where the device was idle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from tok_core import TokError

MAX_LISTED_KERNELS, MAX_LISTED_GAPS, NAME_WIDTH = 15, 5, 64
HOST = ("HtoD", "DtoH")  # substrings of the names of copies from or to the host
PEER = "Memcpy PtoP"  # prefix of the names of copies between devices


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All calls of one kernel or operator. `seconds` is the sum over all `calls`."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True, slots=True)
class Gap:
    """An idle interval of `seconds`, starting `at` seconds after the first start, between the named kernels."""

    seconds: float
    at: float
    after: str
    before: str


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Device time by kernel: `seconds` from first start to last end, of which `idle` seconds without any kernel.

    `kernels` and `gaps` are sorted, the largest first.

    communication  seconds in which only NCCL kernels and peer-to-peer copies ran, including their waits for other
                   devices. This is a lower bound of the communication time: other kernels, which sum small tensors or
                   signal that memory may be read, also wait for other ranks

    A pipeline stage waits for the previous stage inside an NCCL kernel. Without tensor parallelism, `idle +
    communication` is therefore the stage's pipeline bubble.
    """

    seconds: float
    idle: float
    communication: float
    kernels: list[KernelTotal]
    gaps: list[Gap]

    @property
    def idle_share(self) -> float:
        """Return the share of the time between first start and last end in which nothing ran."""
        return self.idle / self.seconds if self.seconds else 0.0

    @property
    def communication_share(self) -> float:
        """Return the share of the same time in which only communication ran, or waited for other devices."""
        return self.communication / self.seconds if self.seconds else 0.0


def device_time(start_K: ArrayLike, end_K: ArrayLike, names: list[str]) -> DeviceTime:
    """Summarise K intervals in seconds, given in any order; they may overlap. Errors: ValueError without intervals."""
    if not names:
        raise ValueError("names is empty; allowed: at least one interval")
    start, end = np.asarray(start_K, float), np.asarray(end_K, float)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(end)  # time at which all intervals up to this one have ended
    wait = np.maximum(start[1:] - reached[:-1], 0.0)
    last = _last_to_end(end)
    gaps = [
        Gap(float(wait[i]), float(reached[i] - start[0]), names[order[last[i]]], names[order[i + 1]])
        for i in np.flatnonzero(wait)
    ]
    gaps.sort(key=lambda gap: -gap.seconds)
    names = [names[i] for i in order]
    computes = np.array([not _communicates(name) for name in names])
    communication = 0.0 if computes.all() else max(_covered(start, end) - _covered(start[computes], end[computes]), 0.0)
    return DeviceTime(
        float(reached[-1] - start[0]), float(wait.sum()), communication, _kernel_totals(end - start, names), gaps
    )


def _covered(start_K: np.ndarray, end_K: np.ndarray) -> float:
    """Return the seconds covered by at least one interval. The intervals must be sorted by start."""
    if not len(start_K):
        return 0.0
    reached = np.maximum.accumulate(end_K)
    return float(reached[-1] - start_K[0] - np.maximum(start_K[1:] - reached[:-1], 0.0).sum())


def _communicates(name: str) -> bool:
    """Return whether the kernel is a pure collective or a copy between devices."""
    return "nccl" in name.lower() or name.startswith(PEER)


def _last_to_end(end_K: np.ndarray) -> np.ndarray:
    """Return for each position i the index of the interval in 0..i that ends last."""
    index = np.arange(len(end_K))
    new_maximum = end_K > np.maximum.accumulate(np.concatenate(([-np.inf], end_K[:-1])))
    found: np.ndarray = np.maximum.accumulate(np.where(new_maximum, index, 0))
    return found


def _kernel_totals(seconds_K: np.ndarray, names: list[str]) -> list[KernelTotal]:
    kinds, kernel_index, calls = np.unique(np.array(names), return_inverse=True, return_counts=True)
    total = np.bincount(kernel_index, weights=seconds_K)
    kernels = [KernelTotal(str(kinds[i]), float(total[i]), int(calls[i])) for i in range(len(kinds))]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def trace_device_time(file: Path) -> DeviceTime:
    """Summarise the GPU's work in a trace: kernels, memory sets and copies on or between devices.

    A trace without GPU work is summarised by its CPU operators instead, without those called by another operator.
    Errors: TokError if the file is not a Chrome-format trace or contains no work.
    """
    try:
        events = msgspec.json.decode(file.read_bytes(), type=_Trace).events
    except (msgspec.DecodeError, OSError) as error:
        raise TokError(f"{file}: is not a trace in Chrome's format ({error})") from error
    events = [event for event in events if event.ph == "X"]
    chosen = [event for event in events if _computes(event)] or _outermost(events)
    if not chosen:
        raise TokError(f"{file}: the trace contains no computation")
    first = min(event.ts for event in chosen)
    start = np.array([event.ts - first for event in chosen]) * 1e-6
    return device_time(
        start, start + np.array([event.dur for event in chosen]) * 1e-6, [event.name for event in chosen]
    )


def _computes(event: _Event) -> bool:
    if event.cat == "gpu_memcpy":
        return not any(way in event.name for way in HOST)
    return event.cat in ("kernel", "gpu_memset")


def _outermost(events: list[_Event]) -> list[_Event]:
    """Drop operators that lie within an earlier operator; operators of a thread nest."""
    outermost: list[_Event] = []
    reached = -np.inf
    operators = (event for event in events if event.cat == "cpu_op")
    for event in sorted(operators, key=lambda event: (event.ts, -event.dur)):
        if event.ts + event.dur > reached:
            outermost.append(event)
            reached = event.ts + event.dur
    return outermost


def describe(times: DeviceTime) -> str:
    """Return a few lines of text: the idle share, the kernels that took longest, and the largest gaps."""
    idle = times.idle_share
    head = f"{times.seconds * 1e3:,.1f} ms: {1 - idle:.1%} busy, {idle:.1%} idle in {len(times.gaps):,} gaps"
    communication = f"{times.communication_share:.1%}"
    head += "" if communication == "0.0%" else f"; {communication} communication only"
    titles = f"  {'kernel':<{NAME_WIDTH}}{'ms':>10}{'share':>8}{'calls':>9}"
    kernels = [_line(kernel, times.seconds) for kernel in times.kernels[:MAX_LISTED_KERNELS]]
    return "\n".join([head, titles, *kernels, *map(_gap_line, times.gaps[:MAX_LISTED_GAPS])])


def _line(kernel: KernelTotal, seconds: float) -> str:
    share = kernel.seconds / seconds if seconds else 0.0
    name = _short(kernel.name, NAME_WIDTH)
    return f"  {name:<{NAME_WIDTH}}{kernel.seconds * 1e3:>10,.2f}{share:>8.1%}{kernel.calls:>9,}"


def _gap_line(gap: Gap) -> str:
    after, before = _short(gap.after, NAME_WIDTH // 2), _short(gap.before, NAME_WIDTH // 2)
    return f"  gap of {gap.seconds * 1e3:,.3f} ms at {gap.at * 1e3:,.1f} ms, after {after}, before {before}"


def _short(name: str, width: int) -> str:
    return name if len(name) < width else name[: width - 2] + "…"
