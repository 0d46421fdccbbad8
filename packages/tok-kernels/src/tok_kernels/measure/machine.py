"""Measure the limits of the machine: its copy bandwidth and its GEMM rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tok_kernels.measure.timing import device_ms

_COPY_BYTES = 1 << 30
_MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits of a device.

    bandwidth  bytes per second, read and write together
    rate       floating-point operations per second
    """

    bandwidth: float
    rate: float

    def floor_ms(self, size: int, operations: int) -> float:
        """Return the least milliseconds to move `size` bytes and do `operations` operations."""
        return max(size / self.bandwidth, operations / self.rate) * 1e3


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure a device by copying 1 GiB and multiplying two matrices of 8192 × 8192."""
    return Machine(2 * _COPY_BYTES / _copy_ms(device) * 1e3, 2 * _MATRIX**3 / _product_ms(device, dtype) * 1e3)


def _copy_ms(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_ms(lambda: target.copy_(source))


def _product_ms(device: torch.device, dtype: torch.dtype) -> float:
    a, b = torch.randn((2, _MATRIX, _MATRIX), dtype=dtype, device=device)
    return device_ms(lambda: a @ b)
