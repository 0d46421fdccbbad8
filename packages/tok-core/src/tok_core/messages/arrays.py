"""Array types of messages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


Int64 = NDArray[np.int64]


Float32 = NDArray[np.float32]


def array(values: object, dtype: type = np.int32) -> np.ndarray:
    """Return a sequence as a one-dimensional array of `dtype`."""
    return np.asarray(values, dtype=dtype)


EMPTY: Int32 = np.empty(0, np.int32)
