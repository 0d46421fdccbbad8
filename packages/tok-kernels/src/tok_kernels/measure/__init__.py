"""Measure the times of kernels, and compare them with the limits of the machine."""

from __future__ import annotations

from tok_kernels.measure.cases import ExpertShape, ModelShape
from tok_kernels.measure.kernels import KernelTime, measure_bandwidth, measure_kernels
from tok_kernels.measure.timing import TimedWork, Timing, cuda_timer

__all__ = [
    "ExpertShape",
    "KernelTime",
    "ModelShape",
    "TimedWork",
    "Timing",
    "cuda_timer",
    "measure_bandwidth",
    "measure_kernels",
]
