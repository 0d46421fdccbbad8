"""Calibration: every candidate runs the same steps; the first of each phase is kept unless another is 5 % faster."""

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
from tok_kernels.attention.phases import PHASES, Phase, PhaseKernel
from tok_kernels.attention.shape import AttentionShape
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
"""What each phase is measured on; every step counts alike, whatever its size."""

POOL_BYTES = 1 << 30
# What all other kernels of a layer take the host to launch where no CUDA graph can hold them because of this one;
# measured with Llama-3.2-1B.
UNCAPTURED_MS = 0.3
# Outputs of 16-bit kernels that round in different places differ by less; wrong ones by far more.
_MAX_RELATIVE_DIFFERENCE = 0.03
# By how much another than the first candidate must be faster: nearer times change places from run to run.
_WORTH = 0.05

_log = logging.getLogger(__name__)


def known(
    shape: AttentionShape, device: torch.device, among: Sequence[Candidate], directory: Path | None = None
) -> Choice | None:
    """The choice that an earlier `calibrate` has left on disk, if any."""
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
    """Of `among` the first in each phase, or the fastest if that is faster by 5 %; from disk where it is known there,
    else measured and kept there.

    `anew` measures in any case; `launches` are the searches for Triton's launches, by default those that the table
    lacks. From now on Triton's kernels are launched as the choice says. Takes seconds, more where kernels have yet
    to be built, and 1 GiB of the device's memory. Raises ValueError, with the reasons, where a phase has no candidate
    that works.
    """
    directory = directory or store.cache_directory()
    key = store.key_of(shape, device, among)
    choice = None if anew else store.read(directory, key)
    if choice is None or not _among(choice, among):
        choice = _measure(shape, device, among, timer, steps, searches(shape, device) if launches is None else launches)
        try:
            store.write(directory, key, choice)
        except OSError as error:
            _log.warning("the calibration is not kept: %s", error)
    config.use(choice.launches)
    return choice


def _among(choice: Choice, among: Sequence[Candidate]) -> bool:
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
        rivals = [one for one in among if one.phase == phase]
        problems = [new(step) for step in steps if step.phase == phase]
        found, failed = _measure_phase(rivals, problems, shape.layers, timer)
        measured += found
        left_out |= failed
    fastest = {phase: _fastest(phase, measured, left_out) for phase in PHASES}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Choice(fastest, tuple(measured), left_out, chosen)


def _measure_phase(
    rivals: Sequence[Candidate], problems: Sequence[AttentionProblem], layers: int, timer: Timer
) -> tuple[list[Measurement], dict[str, str]]:
    """The measurements of all rivals that work, and why the others do not."""
    measured: list[Measurement] = []
    left_out: dict[str, str] = {}
    expected: list[Tensor] = []
    for rival in rivals:
        try:
            kernel = rival.make()
            outputs = [_output(kernel, problem) for problem in problems]
            _compare(outputs, expected)
            measured += [_measurement(rival, kernel, problem, layers, timer) for problem in problems]
            expected = expected or outputs
        # Whatever goes wrong in building or running the kernels of others must not keep the engine from starting.
        except Exception as error:
            left_out[f"{rival.phase} {rival.name}"] = _reason(error)
    return measured, left_out


def _output(kernel: PhaseKernel, problem: AttentionProblem) -> Tensor:
    out = torch.zeros_like(problem.out)
    kernel(problem.q, problem.cache, problem.batch, problem.scale, out)
    return out


def _compare(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for out, other in zip(outputs, expected, strict=False):
        difference = float((out.float() - other.float()).norm() / other.float().norm())
        if not difference < _MAX_RELATIVE_DIFFERENCE:
            raise ArithmeticError(f"its results differ by {difference:.3g} from those of the first candidate")


def _measurement(
    rival: Candidate, kernel: PhaseKernel, problem: AttentionProblem, layers: int, timer: Timer
) -> Measurement:
    timing = timer(work_of(kernel, problem, f"{rival.name}, {rival.phase} {problem.step.name}"))
    cost = timing.per_layer(layers, rival.hidden, UNCAPTURED_MS)
    return Measurement(rival.phase, rival.name, problem.step.name, timing, cost)


def work_of(kernel: PhaseKernel, problem: AttentionProblem, name: str) -> TimedWork:
    """The kernel on the problem: first with a batch that it has never seen, as in a step's first layer."""

    def on(batch: AttentionBatch) -> None:
        kernel(problem.q, problem.cache, batch, problem.scale, problem.out)

    return TimedWork(name, lambda: on(replace(problem.batch)), lambda: on(problem.batch))


def _fastest(phase: Phase, measured: Sequence[Measurement], left_out: dict[str, str]) -> str:
    """The first candidate that works, unless the least geometric mean of costs over the steps is less by `_WORTH`."""
    costs: dict[str, float] = {}
    for one in measured:
        if one.phase == phase:
            costs[one.candidate] = costs.get(one.candidate, 0.0) + math.log(max(one.cost_ms, 1e-9))
    if not costs:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items() if name.startswith(phase))
        raise ValueError(f"no kernel computes {phase} here ({reasons or 'no candidates'})")
    first, best = next(iter(costs)), min(costs, key=lambda name: costs[name])
    steps = sum(one.candidate == best and one.phase == phase for one in measured)
    return best if costs[best] < costs[first] + steps * math.log(1 - _WORTH) else first


def _reason(error: Exception) -> str:
    """The error in a line."""
    told = str(error).strip().splitlines()
    return f"{type(error).__name__}: {told[0][:200] if told else 'without a message'}"
