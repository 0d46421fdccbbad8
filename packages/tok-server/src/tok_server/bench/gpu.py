"""Read GPU memory in use from NVML, without a Python package and without a CUDA context on the device."""

from __future__ import annotations

import ctypes
import os


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuMemory:
    """The memory of one GPU. `peak` is the largest use in bytes that `sample` has seen, summed over all processes."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle
        name = ctypes.create_string_buffer(96)
        library.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
        self.name = name.value.decode()
        self.peak = 0

    def sample(self) -> None:
        """Read the memory in use and update `peak`."""
        memory = _Memory()
        if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0:
            self.peak = max(self.peak, int(memory.used))


def first_gpu() -> GpuMemory | None:
    """Return the first GPU visible to CUDA programs started from this process; None without a driver or a GPU."""
    device = first_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if device is None:
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() != 0:
        return None
    if device.isdigit():
        status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
    else:
        status = library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
    return GpuMemory(library, handle) if status == 0 else None


def first_visible(variable: str | None) -> str | None:
    """Return index or UUID of the first device in CUDA_VISIBLE_DEVICES; None if the variable hides all devices.

    >>> first_visible(None), first_visible("2,0"), first_visible("-1"), first_visible("")
    ('0', '2', None, None)
    """
    if variable is None:
        return "0"
    first = variable.split(",")[0].strip()
    return first if first and first != "-1" else None
