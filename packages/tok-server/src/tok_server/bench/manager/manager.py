"""Measure the manager's CPU time under a workload, alternating plain blocks of steps with profiled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean, median
from typing import NamedTuple

from tok_server.bench.manager.drive import ManagerDriver, StepCost
from tok_server.bench.manager.load import LOADS, vocabulary
from tok_server.bench.manager.profiler import PARTS, ManagerProfiler, Part
from tok_server.bench.manager.result import ManagerResult
from tok_server.bench.manager.simulation import Simulation
from tok_server.bench.watch import ShowProgress, progress_bar, throttled

PAIRS, STEPS = 6, 16  # blocks of each kind, and steps per block
SHOW_SECONDS = 0.1  # seconds between updates of the progress bar
ADMISSION = "admission"


class Measured(NamedTuple):
    """Plain blocks, profiled blocks, and the share of tokens discarded meanwhile."""

    plain: list[StepCost]
    profiled: list[StepCost]
    discarded: float = 0.0


def run_manager(name: str, sequences: int, stop: str | None = None, step_seconds: float = 0.0) -> ManagerResult:
    """Measure the manager under the workload `name`. Errors: InvalidField for a stop string that is not allowed."""

    def make() -> ManagerDriver:
        load = LOADS[name](sequences, () if stop is None else (stop,))
        return ManagerDriver(load, Simulation(load.info, load.output_lengths, vocabulary(), step_seconds))

    plain, profiled, discarded = _run_admission(make) if name == ADMISSION else _run_steps(make())
    started = plain[0].seconds if name == ADMISSION else None
    to_worker, from_worker, to_engine = (_median(one.sizes[kind] / one.steps for one in plain) for kind in range(3))
    ms = _median((one.seconds / one.steps for one in plain), 1e3)
    return ManagerResult(
        engine="tok",
        workload=name,
        sequences=sequences,
        us_per_token=None if started else _median((one.seconds / max(one.tokens, 1) for one in plain), 1e6),
        ms_per_step=ms,
        input_bytes=round(to_worker),
        output_bytes=round(from_worker),
        progress_bytes=round(to_engine),
        running=round(fmean(one.running for one in plain)),
        steps=sum(one.steps for one in plain + profiled),
        discarded_share=round(discarded, 5),
        stop=stop,
        step_time_ms=step_seconds * 1e3 or None,
        us_per_request=started and round(started / sequences * 1e6, 2),
        seconds=started and round(started, 4),
        **_scale_parts(ms, profiled),
    )


def _scale_parts(ms: float, profiled: list[StepCost]) -> dict[Part, float]:
    """Divide `ms` between the parts. Profiling itself takes time, so profiled blocks only give the parts' shares."""
    medians = {part: median(one.parts[part] / one.steps for one in profiled) for part in PARTS}
    scale = ms / sum(medians.values())
    return {part: round(seconds * scale, 4) for part, seconds in medians.items()}


def _median(values: Iterable[float], scale: float = 1.0) -> float:
    return round(median(values) * scale, 4)


def _run_steps(driver: ManagerDriver) -> Measured:
    """Measure plain and profiled blocks in alternation, so that a temporary slowdown of the machine affects both."""
    load, ports, plain, profiled = driver.load, driver.simulation.ports, [], []
    with progress_bar("steps", load.fill_steps + load.warm_up + 2 * PAIRS * STEPS) as show:
        after_turn = _show_progress(show, lambda: (ports.steps, ports.tokens, driver.running))
        driver.fill(after_turn)
        before = driver.simulation.manager.stats()
        for _ in range(PAIRS):
            plain.append(driver.block(STEPS, after_turn))
            profiled.append(driver.block(STEPS, after_turn, ManagerProfiler()))
        after = driver.simulation.manager.stats()
    discarded = after.discarded_tokens - before.discarded_tokens
    kept = after.output_tokens - before.output_tokens
    return Measured(plain, profiled, discarded / max(discarded + kept, 1))


def _run_admission(make: Callable[[], ManagerDriver]) -> Measured:
    """Run the workload twice: plain, then profiled."""
    return Measured([_start_all(make(), None)], [_start_all(make(), ManagerProfiler())])


def _start_all(driver: ManagerDriver, profiler: ManagerProfiler | None) -> StepCost:
    with progress_bar("started", driver.load.sequences) as show:
        after_turn = _show_progress(show, lambda: (driver.running, driver.simulation.ports.tokens, driver.running))
        return driver.start_all(after_turn, profiler)


def _show_progress(show: ShowProgress, values: Callable[[], tuple[int, int, int]]) -> Callable[[], None]:
    return throttled(lambda: show(*values()), SHOW_SECONDS)
