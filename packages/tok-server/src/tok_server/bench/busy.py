"""Busy: of a trace in Chrome's format, on what the device spent its time, and where it waited."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from tok_core import TokError

TOP_WORKS, TOP_GAPS, WIDTH = 15, 5, 64
HOST = ("HtoD", "DtoH")  # in the names of copies from and to the host
PEER = "Memcpy PtoP"  # begins those of copies between devices


@dataclass(frozen=True, slots=True)
class BusyWork:
    """All that ran under one name. `seconds`: of all calls together."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing ran for `seconds`, from `at` seconds after the first start on; between works of these names."""

    seconds: float
    at: float
    after: str
    before: str


@dataclass(frozen=True, slots=True)
class Busy:
    """`seconds` from the first start to the last end, `idle` of them nothing ran; works and gaps, largest first.

    exchanging  seconds in which nothing ran but NCCL's kernels and copies between devices, their waits for other
                devices included: at least what exchanging cost, as other kernels, which sum small tensors or signal
                that memory may be read, wait for other ranks, too

    A stage of a pipeline waits for the one before it in a kernel of NCCL's: without tensor-parallel ranks
    `idle + exchanging` is its bubble.
    """

    seconds: float
    idle: float
    exchanging: float
    works: list[BusyWork]
    gaps: list[Gap]

    @property
    def idle_share(self) -> float:
        """Of the time between the first start and the last end, the share in which nothing ran."""
        return self.idle / self.seconds if self.seconds else 0.0

    @property
    def exchanging_share(self) -> float:
        """Of the same time, the share in which devices did nothing but exchange, or wait for an exchange."""
        return self.exchanging / self.seconds if self.seconds else 0.0


def busy(start_K: ArrayLike, end_K: ArrayLike, names: list[str]) -> Busy:
    """From K intervals in seconds, in any order, which may overlap. Errors: ValueError where there are none."""
    if not names:
        raise ValueError("names is empty; allowed: at least one interval")
    start, end = np.asarray(start_K, float), np.asarray(end_K, float)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(end)  # when all that has begun so far is over
    wait = np.maximum(start[1:] - reached[:-1], 0.0)
    last = _last_to_end(end)
    gaps = [
        Gap(float(wait[i]), float(reached[i] - start[0]), names[order[last[i]]], names[order[i + 1]])
        for i in np.flatnonzero(wait)
    ]
    gaps.sort(key=lambda gap: -gap.seconds)
    names = [names[i] for i in order]
    computes = np.array([not _exchanges(name) for name in names])
    exchanging = 0.0 if computes.all() else max(_covered(start, end) - _covered(start[computes], end[computes]), 0.0)
    return Busy(float(reached[-1] - start[0]), float(wait.sum()), exchanging, _works(end - start, names), gaps)


def _covered(start_K: np.ndarray, end_K: np.ndarray) -> float:
    """Seconds that at least one of the intervals covers; they are in the order of their starts."""
    if not len(start_K):
        return 0.0
    reached = np.maximum.accumulate(end_K)
    return float(reached[-1] - start_K[0] - np.maximum(start_K[1:] - reached[:-1], 0.0).sum())


def _exchanges(name: str) -> bool:
    """Whether it is a collective or a transfer between devices, and nothing else."""
    return "nccl" in name.lower() or name.startswith(PEER)


def _last_to_end(end_K: np.ndarray) -> np.ndarray:
    """At each place the index of the one that ends last among those up to it."""
    index = np.arange(len(end_K))
    later = end_K > np.maximum.accumulate(np.concatenate(([-np.inf], end_K[:-1])))
    found: np.ndarray = np.maximum.accumulate(np.where(later, index, 0))
    return found


def _works(seconds_K: np.ndarray, names: list[str]) -> list[BusyWork]:
    kinds, which, calls = np.unique(np.array(names), return_inverse=True, return_counts=True)
    total = np.bincount(which, weights=seconds_K)
    works = [BusyWork(str(kinds[i]), float(total[i]), int(calls[i])) for i in range(len(kinds))]
    return sorted(works, key=lambda work: -work.seconds)


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def busy_of_trace(file: Path) -> Busy:
    """Of what the GPU computed: kernels, memory set, copies within it. Of a trace without a GPU: the operators.

    Operators are counted where no other one called them. Errors: TokError for a file that is no such trace.
    """
    try:
        events = msgspec.json.decode(file.read_bytes(), type=_Trace).events
    except (msgspec.DecodeError, OSError) as error:
        raise TokError(f"{file}: is no trace in Chrome's format ({error})") from error
    events = [one for one in events if one.ph == "X"]
    chosen = [one for one in events if _computes(one)] or _outermost(events)
    if not chosen:
        raise TokError(f"{file}: nothing was computed while it was traced")
    first = min(one.ts for one in chosen)
    start = np.array([one.ts - first for one in chosen]) * 1e-6
    return busy(start, start + np.array([one.dur for one in chosen]) * 1e-6, [one.name for one in chosen])


def _computes(event: _Event) -> bool:
    if event.cat == "gpu_memcpy":
        return not any(way in event.name for way in HOST)
    return event.cat in ("kernel", "gpu_memset")


def _outermost(events: list[_Event]) -> list[_Event]:
    """Operators of one thread nest; those that lie within an earlier one are left out."""
    found: list[_Event] = []
    reached = -np.inf
    for one in sorted((one for one in events if one.cat == "cpu_op"), key=lambda one: (one.ts, -one.dur)):
        if one.ts + one.dur > reached:
            found.append(one)
            reached = one.ts + one.dur
    return found


def describe(found: Busy) -> str:
    """A few lines for people: the share idle, the works that took longest, the largest gaps."""
    idle = found.idle_share
    head = f"{found.seconds * 1e3:,.1f} ms: {1 - idle:.1%} busy, {idle:.1%} idle in {len(found.gaps):,} gaps"
    exchanging = f"{found.exchanging_share:.1%}"
    head += "" if exchanging == "0.0%" else f"; {exchanging} only exchanging"
    titles = f"  {'work':<{WIDTH}}{'ms':>10}{'share':>8}{'calls':>9}"
    works = [_line(work, found.seconds) for work in found.works[:TOP_WORKS]]
    return "\n".join([head, titles, *works, *map(_gap_line, found.gaps[:TOP_GAPS])])


def _line(work: BusyWork, seconds: float) -> str:
    share = work.seconds / seconds if seconds else 0.0
    return f"  {_short(work.name, WIDTH):<{WIDTH}}{work.seconds * 1e3:>10,.2f}{share:>8.1%}{work.calls:>9,}"


def _gap_line(gap: Gap) -> str:
    after, before = _short(gap.after, WIDTH // 2), _short(gap.before, WIDTH // 2)
    return f"  gap of {gap.seconds * 1e3:,.3f} ms at {gap.at * 1e3:,.1f} ms, after {after}, before {before}"


def _short(name: str, width: int) -> str:
    return name if len(name) < width else name[: width - 2] + "…"
