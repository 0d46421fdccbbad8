"""Copy a step's host arrays to the device in one transfer, and its outputs back to the host.

All copies are enqueued in the step's own CUDA stream; page-locked memory lets the host run on. A second stream,
synchronised by events, was no faster on an H200: steps of 0.1 ms and more took as long, and steps of a few microseconds
took at least 13 µs longer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: the widest loads of the kernels
STAGING_BYTES = 4 << 20
MAX_VIEWS = 4096  # of the target buffer that are kept; making one takes 4 µs, finding it 0.3


class Staging:
    """Page-locked buffers, used in turn, to copy arrays to one device.

    buffers  number of buffers: of steps whose copies may be in flight before `put` waits for the oldest
    size     bytes of a buffer, for one step's arrays; an array that does not fit is copied by itself
    """

    def __init__(self, device: torch.device, buffers: int, size: int = STAGING_BYTES) -> None:
        self.device = device
        if device.type == "cuda":
            self._target = torch.empty(size, dtype=torch.uint8, device=device)
            self._sources = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(buffers)]
            self._copied = [torch.cuda.Event() for _ in range(buffers)]  # type: ignore[no-untyped-call]
            self._turn = 0
            self._views: dict[tuple[object, ...], Tensor] = {}  # steps of a size have the same views

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Enqueue a copy of the arrays; return the tensors on the device, by name, without waiting for the copy.

        Work enqueued before the next `put` may read the tensors. CUDA graphs read them by address: if the first arrays
        have the same shapes and order as in another call, they get the same addresses, whatever follows them.
        """
        if self.device.type != "cuda":
            return {name: torch.from_numpy(np.array(array)).to(self.device) for name, array in arrays.items()}
        self._turn = (self._turn + 1) % len(self._sources)
        source, end = self._sources[self._turn], 0
        self._copied[self._turn].synchronize()
        host, tensors = source.numpy(), {}
        for name, array in arrays.items():
            if end + array.nbytes > len(host):
                tensors[name] = torch.from_numpy(np.array(array)).pin_memory().to(self.device, non_blocking=True)
                continue
            host[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            tensors[name] = self._view(end, array)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._target[:end].copy_(source[:end], non_blocking=True)
        self._copied[self._turn].record()
        return tensors

    def _view(self, start: int, like: np.ndarray) -> Tensor:
        key = start, like.dtype, like.shape
        view = self._views.get(key)
        if view is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            view = self._target[start : start + like.nbytes].view(_DTYPES[like.dtype]).view(like.shape)
            self._views[key] = view
        return view


_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class OutputStaging:
    """Page-locked buffers, used in turn, to copy sampled tokens to the host.

    A step's tokens must be read before those of `buffers` further steps are copied. `rows` is the maximum of rows that
    a step samples.
    """

    def __init__(self, device: torch.device, buffers: int, rows: int) -> None:
        self._buffers = []
        if device.type == "cuda":
            self._buffers = [torch.empty(2 * rows, dtype=torch.int32, pin_memory=True) for _ in range(buffers)]
        self._turn = 0

    def copy_to_host(self, sampled_2R: Tensor) -> Tensor:
        """Enqueue a copy of int32 `[2, R]`; return it on the host, valid once the device has finished the copy."""
        if not self._buffers:
            return sampled_2R
        self._turn = (self._turn + 1) % len(self._buffers)
        host = self._buffers[self._turn][: sampled_2R.numel()].view(sampled_2R.shape)
        host.copy_(sampled_2R, non_blocking=True)
        return host


def copy_to_host(x: Tensor) -> Tensor:
    """Enqueue a copy into new page-locked memory; return it, valid once the device has finished the copy."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
