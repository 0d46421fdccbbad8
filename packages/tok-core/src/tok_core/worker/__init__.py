"""Run steps on a worker's device: launch forward passes, sample tokens, change weights, sleep."""

from __future__ import annotations

from tok_core.worker.runner import LaunchedStep, Runner
from tok_core.worker.startup import KernelsMeasured, KernelTime, MemoryNeeds, PhaseReport, StepFloor, set_up

__all__ = [
    "KernelTime",
    "KernelsMeasured",
    "LaunchedStep",
    "MemoryNeeds",
    "PhaseReport",
    "Runner",
    "StepFloor",
    "set_up",
]
