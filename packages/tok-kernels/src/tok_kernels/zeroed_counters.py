"""Counters with which the programs of a kernel find out which of them arrives last; kernels leave them as zeros."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class ZeroedCounters(threading.local):
    """Int32 counters on each device, all 0 between kernels.

    Each host thread has its own, since launches of different threads may overlap.

    size  number of counters on a device
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._counters: dict[torch.device, Tensor] = {}

    def of(self, device: torch.device) -> Tensor:
        """Return the counters on a device, int32 `[size]`."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(self._size, dtype=torch.int32, device=device)
        return self._counters[device]
