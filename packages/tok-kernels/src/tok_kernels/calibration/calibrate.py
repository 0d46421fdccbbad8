"""Measure all candidates of each attention phase on the same steps, and choose the fastest."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tok_kernels import launch_config as config
from tok_kernels.attention.interface import PHASES, AttentionShape, Phase, PhaseKernel
from tok_kernels.batch import AttentionBatch
from tok_kernels.calibration import store
from tok_kernels.calibration.candidates import Candidate
from tok_kernels.calibration.choice import Choice, Measurement
from tok_kernels.calibration.launch_search import LaunchSearch, launch_searches
from tok_kernels.measure.steps import AttentionProblem, AttentionStep, new_problem
from tok_kernels.measure.timing import TimedWork, Timer, cuda_timer

CALIBRATION_STEPS = (
    AttentionStep(chunks=((214, 0),) * 20),
    AttentionStep(chunks=((512, 0),) * 16),
    AttentionStep(chunks=((512, 4096),) * 4),
    AttentionStep(rows=64, own=2048),
    AttentionStep(rows=1024, own=640),
    AttentionStep(rows=2048, own=112, groups=8, prefix=704),
    AttentionStep(rows=2048, own=112, groups=64, prefix=704),
)
"""Steps on which the phases are measured; all steps have the same weight."""

MAX_POOL_BYTES = 1 << 30  # size of a step's page pool
# Host time to launch the other kernels of a layer, which a planned kernel keeps out of CUDA graphs; measured with
# Llama-3.2-1B.
UNCAPTURED_LAUNCH_MS = 0.3
# Maximum norm of the difference of two kernels' outputs, relative to the norm of the output. Correct 16-bit kernels
# differ by less, since they round in different places; wrong kernels differ by far more.
_MAX_RELATIVE_DIFFERENCE = 0.03
# Fraction of time by which a candidate must beat the first. The order of closer times varies from run to run.
_MIN_GAIN_FRACTION = 0.05

_log = logging.getLogger(__name__)


def stored_choice(
    shape: AttentionShape, device: torch.device, candidates: Sequence[Candidate], directory: Path | None = None
) -> Choice | None:
    """Return the choice that an earlier `calibrate` stored on disk; None if there is none."""
    return store.read(directory or store.cache_directory(), store.choice_key(shape, device, candidates))


def calibrate(
    shape: AttentionShape,
    device: torch.device,
    candidates: Sequence[Candidate],
    *,
    directory: Path | None = None,
    remeasure: bool = False,
    timer: Timer = cuda_timer,
    steps: Sequence[AttentionStep] = CALIBRATION_STEPS,
    searches: Sequence[LaunchSearch] | None = None,
) -> Choice:
    """Choose the fastest candidate for each phase; the first, unless another is faster by 5 %.

    The choice is read from disk if it is stored there and `remeasure` is not set. Otherwise the candidates are measured
    and the choice is stored. `searches` find launch configurations of Triton's kernels (None: `launch_searches`). From
    this call on, Triton's kernels use the configurations found.

    Measurement takes seconds, longer if kernels have to be built first, and 1 GiB of device memory. Raises ValueError,
    with the reasons, if all candidates of a phase fail.
    """
    directory = directory or store.cache_directory()
    if device.type == "cuda":
        config.override_for_card(torch.cuda.get_device_name(device))
    key = store.choice_key(shape, device, candidates)
    choice = None if remeasure else store.read(directory, key)
    if choice is None or not _are_candidates(choice, candidates):
        searches = launch_searches(shape, device) if searches is None else searches
        choice = _measure(shape, device, candidates, timer, steps, searches)
        try:
            store.write(directory, key, choice)
        except OSError as error:
            _log.warning("cannot store the calibration: %s", error)
    config.override_launches(choice.launches)
    return choice


def _are_candidates(choice: Choice, candidates: Sequence[Candidate]) -> bool:
    """Return whether every chosen kernel is one of the candidates."""
    available = {(candidate.phase, candidate.name) for candidate in candidates}
    return all((phase, name) in available for phase, name in choice.fastest.items())


def _measure(
    shape: AttentionShape,
    device: torch.device,
    candidates: Sequence[Candidate],
    timer: Timer,
    steps: Sequence[AttentionStep],
    searches: Sequence[LaunchSearch],
) -> Choice:
    """Search the launch configurations, and then measure the candidates of every phase."""
    make_problem = partial(new_problem, shape=shape, device=device, pool_bytes=MAX_POOL_BYTES)
    fastest_launches = {search.kernel: search.fastest(make_problem, timer) for search in searches}
    config.override_launches(fastest_launches)
    measured: list[Measurement] = []
    rejected: dict[str, str] = {}
    for phase in PHASES:
        phase_candidates = [candidate for candidate in candidates if candidate.phase == phase]
        problems = [make_problem(step) for step in steps if step.phase == phase]
        phase_measured, phase_rejected = _measure_phase(phase_candidates, problems, shape.layers, timer)
        measured += phase_measured
        rejected |= phase_rejected
    fastest = {phase: _fastest(phase, measured, rejected) for phase in PHASES}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Choice(fastest, tuple(measured), rejected, fastest_launches)


def _measure_phase(
    candidates: Sequence[Candidate], problems: Sequence[AttentionProblem], layers: int, timer: Timer
) -> tuple[list[Measurement], dict[str, str]]:
    """Measure the candidates of a phase; return the measurements of those that work, and the errors of the others."""
    measured: list[Measurement] = []
    rejected: dict[str, str] = {}
    expected: list[Tensor] = []
    for candidate in candidates:
        try:
            kernel = candidate.build()
            outputs = [_output(kernel, problem) for problem in problems]
            _compare(outputs, expected)
            measured += [_measurement(candidate, kernel, problem, layers, timer) for problem in problems]
            expected = expected or outputs
        # Kernels of other packages may raise any error, which must not keep the engine from starting.
        except Exception as error:
            rejected[f"{candidate.phase} {candidate.name}"] = _reason(error)
    return measured, rejected


def _output(kernel: PhaseKernel, problem: AttentionProblem) -> Tensor:
    """Return the kernel's output in a new tensor."""
    out = torch.zeros_like(problem.out)
    kernel(problem.q, problem.cache, problem.batch, problem.scale, out)
    return out


def _compare(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise ArithmeticError if outputs differ from `expected`, those of the first candidate; empty: no check."""
    for out, first_output in zip(outputs, expected, strict=False):
        difference = float((out.float() - first_output.float()).norm() / first_output.float().norm())
        if not difference < _MAX_RELATIVE_DIFFERENCE:
            raise ArithmeticError(f"results differ by {difference:.3g} from those of the first candidate")


def _measurement(
    candidate: Candidate, kernel: PhaseKernel, problem: AttentionProblem, layers: int, timer: Timer
) -> Measurement:
    timing = timer(timed_work(kernel, problem, f"{candidate.name}, {candidate.phase} {problem.step.name}"))
    cost = timing.per_layer(layers, candidate.hides_host_time, UNCAPTURED_LAUNCH_MS)
    return Measurement(candidate.phase, candidate.name, problem.step.name, timing, cost)


def timed_work(kernel: PhaseKernel, problem: AttentionProblem, name: str) -> TimedWork:
    """Return the kernel's work on a problem; `TimedWork.first` has a new batch object, for which the kernel plans."""

    def run(batch: AttentionBatch) -> None:
        kernel(problem.q, problem.cache, batch, problem.scale, problem.out)

    return TimedWork(name, lambda: run(replace(problem.batch)), lambda: run(problem.batch))


def _fastest(phase: Phase, measured: Sequence[Measurement], rejected: dict[str, str]) -> str:
    """Return the candidate with the least geometric mean of costs; the first, unless it is beaten by 5 %.

    Raises ValueError, with the reasons, if no candidate works.
    """
    costs: dict[str, float] = {}  # sums of logarithms
    for measurement in measured:
        if measurement.phase == phase:
            log_cost = math.log(max(measurement.cost_ms, 1e-9))
            costs[measurement.candidate] = costs.get(measurement.candidate, 0.0) + log_cost
    if not costs:
        reasons = "; ".join(f"{name}: {why}" for name, why in rejected.items() if name.startswith(phase))
        raise ValueError(f"no kernel computes {phase} here ({reasons or 'no candidates'})")
    first, best = next(iter(costs)), min(costs, key=lambda name: costs[name])
    steps = sum(measurement.candidate == best and measurement.phase == phase for measurement in measured)
    return best if costs[best] < costs[first] + steps * math.log(1 - _MIN_GAIN_FRACTION) else first


def _reason(error: Exception) -> str:
    """Return type and message of an error as one line of at most about 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'without a message'}"
