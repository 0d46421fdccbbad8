"""Counters with which the programs of a kernel find out which of them arrives last; kernels leave them as zeros."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class ZeroedCounters(threading.local):
    """Int32 counters on each device, all 0 between kernels.

    Each host thread has its own, since launches of different threads may overlap. Launches of one thread must follow
    each other on the device. A thread launches once before it captures a CUDA graph, whose replay would set the zeros.

    size  number of counters on a device
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._counters: dict[torch.device, Tensor] = {}

    def of(self, device: torch.device) -> Tensor:
        """Return the counters on a device, int32 `[size]`. Raise RuntimeError if a capture would create them."""
        if device not in self._counters:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a kernel with counters is captured before its first launch by this thread")
            self._counters[device] = torch.zeros(self._size, dtype=torch.int32, device=device)
        return self._counters[device]
