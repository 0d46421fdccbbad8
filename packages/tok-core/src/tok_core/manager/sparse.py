"""Sparse: wide arrays of which rows cost memory, and time to get it, only as far as they are written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from tok_core.messages import Int32


def sparse_zeros(shape: Sequence[int]) -> Int32:
    """Int32 zeros, in small pages of memory.

    NumPy asks the operating system for pages of 2 MiB: each is filled as a whole when one place of it is written, so
    that a short sequence in each of thousands of long rows would take gigabytes, and seconds. A row keeps what was once
    written of it. Errors: MemoryError that names the shape.
    """
    size = math.prod(shape) * np.dtype(np.int32).itemsize
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {size / 2**30:.1f} GiB for an array of shape {tuple(shape)}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages does not know the advice
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32, math.prod(shape)).reshape(shape)
