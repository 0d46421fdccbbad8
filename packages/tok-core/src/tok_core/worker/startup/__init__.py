"""Start a worker: choose kernels, size the cache, warm up, capture CUDA graphs."""

from __future__ import annotations

from tok_core.worker.startup.kernel_choice import KernelsMeasured, KernelTime, PhaseReport, StepFloor, measure, phases
from tok_core.worker.startup.memory_check import MemoryNeeds
from tok_core.worker.startup.setup import set_up

__all__ = [
    "KernelTime",
    "KernelsMeasured",
    "MemoryNeeds",
    "PhaseReport",
    "StepFloor",
    "measure",
    "phases",
    "set_up",
]
