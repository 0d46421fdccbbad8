"""Measure all candidates of each attention phase on the same steps, and choose the first or one that is 5 % faster."""

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
from tok_kernels.calibration.launches import Search, searches
from tok_kernels.measure.steps import AttentionProblem, AttentionStep, new_problem
from tok_kernels.measure.timing import TimedWork, Timer, cuda_timer

STEPS = (
    AttentionStep(chunks=((214, 0),) * 20),
    AttentionStep(chunks=((512, 0),) * 16),
    AttentionStep(chunks=((512, 4096),) * 4),
    AttentionStep(rows=64, own=2048),
    AttentionStep(rows=1024, own=640),
    AttentionStep(rows=2048, own=112, groups=8, prefix=704),
    AttentionStep(rows=2048, own=112, groups=64, prefix=704),
)
"""Steps on which each phase is measured; every step has the same weight, whatever its size."""

POOL_BYTES = 1 << 30  # maximum size in bytes of a step's page pool
# Host time in ms to launch a layer's other kernels, which a planned kernel keeps out of the CUDA graph. Measured with
# Llama-3.2-1B.
UNCAPTURED_MS = 0.3
# Maximum relative norm of the difference of outputs. Correct 16-bit kernels that round in different places differ by
# less, wrong kernels by far more.
_MAX_RELATIVE_DIFFERENCE = 0.03
# Fraction of time by which another candidate must beat the first. The order of closer times varies from run to run.
_MIN_GAIN = 0.05

_log = logging.getLogger(__name__)


def known(
    shape: AttentionShape, device: torch.device, among: Sequence[Candidate], directory: Path | None = None
) -> Choice | None:
    """Return the choice that an earlier `calibrate` stored on disk, or None."""
    return store.read(directory or store.cache_directory(), store.key_of(shape, device, among))


def calibrate(
    shape: AttentionShape,
    device: torch.device,
    among: Sequence[Candidate],
    *,
    directory: Path | None = None,
    anew: bool = False,
    timer: Timer = cuda_timer,
    steps: Sequence[AttentionStep] = STEPS,
    launches: Sequence[Search] | None = None,
) -> Choice:
    """Choose for each phase the first of the candidates `among`, or the fastest if that is faster by 5 %.

    A stored choice of these candidates is read from disk, unless `anew` is set. Otherwise the candidates are measured
    and the choice is stored. `launches` are the searches for launch configurations of Triton's kernels, by default
    `searches`. From this call on, Triton's kernels use the chosen configurations.

    Measurement takes seconds, longer if kernels have to be built first, and 1 GiB of device memory. Raises ValueError,
    with the reasons, if a phase has no working candidate.
    """
    directory = directory or store.cache_directory()
    if device.type == "cuda":
        config.use_card(torch.cuda.get_device_name(device))
    key = store.key_of(shape, device, among)
    choice = None if anew else store.read(directory, key)
    if choice is None or not _among(choice, among):
        choice = _measure(shape, device, among, timer, steps, searches(shape, device) if launches is None else launches)
        try:
            store.write(directory, key, choice)
        except OSError as error:
            _log.warning("cannot store the calibration: %s", error)
    config.use(choice.launches)
    return choice


def _among(choice: Choice, among: Sequence[Candidate]) -> bool:
    """Return whether every chosen kernel is one of the candidates."""
    there = {(one.phase, one.name) for one in among}
    return all((phase, name) in there for phase, name in choice.fastest.items())


def _measure(
    shape: AttentionShape,
    device: torch.device,
    among: Sequence[Candidate],
    timer: Timer,
    steps: Sequence[AttentionStep],
    launches: Sequence[Search],
) -> Choice:
    new = partial(new_problem, shape=shape, device=device, pool_bytes=POOL_BYTES)
    chosen = {search.kernel: search.best(new, timer) for search in launches}
    config.use(chosen)
    measured: list[Measurement] = []
    left_out: dict[str, str] = {}
    for phase in PHASES:
        candidates = [one for one in among if one.phase == phase]
        problems = [new(step) for step in steps if step.phase == phase]
        found, failed = _measure_phase(candidates, problems, shape.layers, timer)
        measured += found
        left_out |= failed
    fastest = {phase: _fastest(phase, measured, left_out) for phase in PHASES}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Choice(fastest, tuple(measured), left_out, chosen)


def _measure_phase(
    candidates: Sequence[Candidate], problems: Sequence[AttentionProblem], layers: int, timer: Timer
) -> tuple[list[Measurement], dict[str, str]]:
    """Return the measurements of all candidates that work, and the reasons why the others do not work."""
    measured: list[Measurement] = []
    left_out: dict[str, str] = {}
    expected: list[Tensor] = []
    for candidate in candidates:
        try:
            kernel = candidate.make()
            outputs = [_output(kernel, problem) for problem in problems]
            _compare(outputs, expected)
            measured += [_measurement(candidate, kernel, problem, layers, timer) for problem in problems]
            expected = expected or outputs
        # Kernels of other packages may raise any error when built or run; none may keep the engine from starting.
        except Exception as error:
            left_out[f"{candidate.phase} {candidate.name}"] = _reason(error)
    return measured, left_out


def _output(kernel: PhaseKernel, problem: AttentionProblem) -> Tensor:
    out = torch.zeros_like(problem.out)
    kernel(problem.q, problem.cache, problem.batch, problem.scale, out)
    return out


def _compare(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise ArithmeticError if outputs differ from those of the first candidate, if there are any."""
    for out, other in zip(outputs, expected, strict=False):
        difference = float((out.float() - other.float()).norm() / other.float().norm())
        if not difference < _MAX_RELATIVE_DIFFERENCE:
            raise ArithmeticError(f"results differ by {difference:.3g} from those of the first candidate")


def _measurement(
    candidate: Candidate, kernel: PhaseKernel, problem: AttentionProblem, layers: int, timer: Timer
) -> Measurement:
    timing = timer(work_of(kernel, problem, f"{candidate.name}, {candidate.phase} {problem.step.name}"))
    cost = timing.per_layer(layers, candidate.hidden, UNCAPTURED_MS)
    return Measurement(candidate.phase, candidate.name, problem.step.name, timing, cost)


def work_of(kernel: PhaseKernel, problem: AttentionProblem, name: str) -> TimedWork:
    """Return the kernel on the problem as timed work; `first` uses a new batch object, so that the kernel plans."""

    def on(batch: AttentionBatch) -> None:
        kernel(problem.q, problem.cache, batch, problem.scale, problem.out)

    return TimedWork(name, lambda: on(replace(problem.batch)), lambda: on(problem.batch))


def _fastest(phase: Phase, measured: Sequence[Measurement], left_out: dict[str, str]) -> str:
    """Return the first working candidate, unless another's geometric mean of costs is less by `_MIN_GAIN`.

    Raises ValueError, with the reasons, if no candidate works.
    """
    costs: dict[str, float] = {}
    for one in measured:
        if one.phase == phase:
            costs[one.candidate] = costs.get(one.candidate, 0.0) + math.log(max(one.cost_ms, 1e-9))
    if not costs:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items() if name.startswith(phase))
        raise ValueError(f"no kernel computes {phase} here ({reasons or 'no candidates'})")
    first, best = next(iter(costs)), min(costs, key=lambda name: costs[name])
    steps = sum(one.candidate == best and one.phase == phase for one in measured)
    return best if costs[best] < costs[first] + steps * math.log(1 - _MIN_GAIN) else first


def _reason(error: Exception) -> str:
    """Return the error as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'without a message'}"
