"""Start a worker: check memory, choose kernels, load weights, size the KV cache, warm up, capture CUDA graphs."""

from __future__ import annotations

from tok_core.worker.startup.kernel_report import KernelsMeasured, KernelTime, PhaseReport, StepFloor
from tok_core.worker.startup.memory import MemoryNeeds
from tok_core.worker.startup.setup import set_up

__all__ = [
    "KernelTime",
    "KernelsMeasured",
    "MemoryNeeds",
    "PhaseReport",
    "StepFloor",
    "set_up",
]
