"""What the machine allows: its copy bandwidth and the rate of its matrix products, measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tok_kernels.measure.timing import device_ms

_COPY_BYTES = 1 << 30
_MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes a second, read and write together, and floating-point operations a second."""

    bandwidth: float
    rate: float

    def floor_ms(self, size: int, operations: int) -> float:
        """The least milliseconds in which that many bytes are moved and that many operations done."""
        return max(size / self.bandwidth, operations / self.rate) * 1e3


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Copies a GiB, and multiplies two matrices of 8192 × 8192."""
    return Machine(2 * _COPY_BYTES / _copy_ms(device) * 1e3, 2 * _MATRIX**3 / _product_ms(device, dtype) * 1e3)


def _copy_ms(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_ms(lambda: target.copy_(source))


def _product_ms(device: torch.device, dtype: torch.dtype) -> float:
    a, b = torch.randn((2, _MATRIX, _MATRIX), dtype=dtype, device=device)
    return device_ms(lambda: a @ b)
