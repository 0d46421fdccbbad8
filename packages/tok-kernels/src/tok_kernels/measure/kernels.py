"""Time every kernel of a backend against its floor: the least time to move its bytes and do its operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from tok_kernels.backend import Backend
from tok_kernels.measure.cases import Case, ModelShape, cases, multiplies_fp8
from tok_kernels.measure.expert_cases import expert_cases
from tok_kernels.measure.timing import device_ms

_COPY_BYTES = 1 << 30
_MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits of a device.

    bandwidth  bytes per second, reads and writes added
    rate       floating-point operations per second
    fp8_rate   operations per second on float8 numbers; 0: the device has none
    """

    bandwidth: float
    rate: float
    fp8_rate: float = 0.0

    def floor_ms(self, size: int, operations: int, *, fp8: bool = False) -> float:
        """Return the least milliseconds to move `size` bytes and do `operations` operations."""
        return max(size / self.bandwidth, operations / (self.fp8_rate if fp8 else self.rate)) * 1e3


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Milliseconds of a kernel on work of some `size`, and the least milliseconds that the machine allows.

    `tokens` is the number of tokens if the work is that of a whole forward pass; else 0.
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
        """Tokens per second of forward passes of this duration; 0 if the work is no whole forward pass."""
        return self.tokens / self.ms * 1e3


def measure_kernels(backend: Backend, model: ModelShape, device: torch.device) -> tuple[Machine, Iterator[KernelTime]]:
    """Return the machine's limits, and an iterator that measures one kernel after the other.

    Raises ValueError if the device is not CUDA.
    """
    if device.type != "cuda":
        raise ValueError(f"device is {device.type}; allowed: cuda")
    both = chain(cases(backend, model, device), expert_cases(backend, model, device))
    machine = measure_machine(device, model.attention.dtype)
    return machine, (_measured(case, machine) for case in both)


def _measured(case: Case, machine: Machine) -> KernelTime:
    case.run()
    floor_ms = machine.floor_ms(case.moved, case.operations, fp8=case.fp8)
    return KernelTime(case.kernel, case.size, device_ms(case.run), floor_ms, case.tokens)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure a device by a copy of 1 GiB and matmuls of 8192 × 8192 matrices."""
    operations = 2 * _MATRIX**3
    fp8_rate = operations / _fp8_matmul_ms(device) * 1e3 if multiplies_fp8(device) else 0.0
    return Machine(measure_bandwidth(device), operations / _matmul_ms(device, dtype) * 1e3, fp8_rate)


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, reads and writes added, of a copy of 1 GiB on a CUDA device."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / device_ms(lambda: target.copy_(source)) * 1e3


def _matmul_ms(device: torch.device, dtype: torch.dtype) -> float:
    a, b = torch.randn((2, _MATRIX, _MATRIX), dtype=dtype, device=device)
    return device_ms(lambda: a @ b)


def _fp8_matmul_ms(device: torch.device) -> float:
    a, b = torch.randn((2, _MATRIX, _MATRIX), device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return device_ms(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
