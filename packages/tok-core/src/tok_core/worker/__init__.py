"""Execute steps on a worker's device, in the order in which they arrive."""

from __future__ import annotations

from tok_core.worker.runner import Launched, Runner
from tok_core.worker.startup import KernelsMeasured, KernelTime, MemoryNeeds, PhaseReport, StepFloor, set_up

__all__ = [
    "KernelTime",
    "KernelsMeasured",
    "Launched",
    "MemoryNeeds",
    "PhaseReport",
    "Runner",
    "StepFloor",
    "set_up",
]
