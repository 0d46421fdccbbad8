"""Time every kernel of a backend against its floor (roofline): the longer of its memory time and its compute time.

The memory time is the kernel's minimum bytes at the bandwidth of a copy. The compute time is its FLOPs at the rate of a
large GEMM. Both limits are measured on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from tok_kernels.backend import Backend
from tok_kernels.measure.cases import Case, ModelShape, cases, has_fp8_matmul
from tok_kernels.measure.expert_cases import expert_cases
from tok_kernels.measure.timing import device_ms

_COPY_BYTES = 1 << 30
_MATRIX_SIZE = 8192  # rows and columns


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits of a device.

    bandwidth  bytes per second, reads and writes added
    rate       FLOPs per second of GEMMs in the model's dtype
    fp8_rate   FLOPs per second of float8 GEMMs; 0: the device has none
    """

    bandwidth: float
    rate: float
    fp8_rate: float = 0.0

    def floor_ms(self, min_bytes: int, flops: int, *, fp8: bool = False) -> float:
        """Return the least milliseconds in which a kernel can move its bytes and compute its FLOPs."""
        return max(min_bytes / self.bandwidth, flops / (self.fp8_rate if fp8 else self.rate)) * 1e3


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Milliseconds of a kernel on inputs of some `size`, and its floor: the least milliseconds on this machine.

    `tokens` is the number of tokens if the kernels are those of a whole forward pass; else 0.
    """

    kernel: str
    size: str
    ms: float
    floor_ms: float
    tokens: int = 0

    @property
    def share(self) -> float:
        """Floor as a fraction of the kernel's time."""
        return self.floor_ms / self.ms

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of forward passes of this duration; 0 if the kernels are no whole forward pass."""
        return self.tokens / self.ms * 1e3


def measure_kernels(backend: Backend, model: ModelShape, device: torch.device) -> tuple[Machine, Iterator[KernelTime]]:
    """Return the machine's limits, and an iterator that measures each kernel when it is requested.

    Raises ValueError if the device is not CUDA.
    """
    if device.type != "cuda":
        raise ValueError(f"device is {device.type}; allowed: cuda")
    all_cases = chain(cases(backend, model, device), expert_cases(backend, model, device))
    machine = measure_machine(device, model.attention.dtype)
    return machine, (_measure(case, machine) for case in all_cases)


def _measure(case: Case, machine: Machine) -> KernelTime:
    case.run()  # compiles the kernel
    floor_ms = machine.floor_ms(case.min_bytes, case.flops, fp8=case.fp8)
    return KernelTime(case.kernel, case.size, device_ms(case.run), floor_ms, case.tokens)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure a device's limits by a copy of 1 GiB and by GEMMs of 8192 × 8192 matrices."""
    flops = 2 * _MATRIX_SIZE**3
    fp8_rate = flops / _fp8_matmul_ms(device) * 1e3 if has_fp8_matmul(device) else 0.0
    return Machine(measure_bandwidth(device), flops / _matmul_ms(device, dtype) * 1e3, fp8_rate)


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, reads and writes added, of a copy of 1 GiB on a CUDA device."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / device_ms(lambda: target.copy_(source)) * 1e3


def _matmul_ms(device: torch.device, dtype: torch.dtype) -> float:
    a, b = torch.randn((2, _MATRIX_SIZE, _MATRIX_SIZE), dtype=dtype, device=device)
    return device_ms(lambda: a @ b)


def _fp8_matmul_ms(device: torch.device) -> float:
    a, b = torch.randn((2, _MATRIX_SIZE, _MATRIX_SIZE), device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return device_ms(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
