"""Ring: the most recent rows that were pushed, in constant memory."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Kind = TypeVar("Kind", bound=np.generic)


class Ring(Generic[Kind]):
    """Ring buffer of at most `size` rows of one shape."""

    def __init__(self, size: int, shape: tuple[int, ...], dtype: type[Kind]) -> None:
        self._rows: npt.NDArray[Kind] = np.zeros((size, *shape), dtype)
        self._pushed = 0

    def __len__(self) -> int:
        return min(self._pushed, len(self._rows))

    def push(self, row: npt.NDArray[Kind]) -> None:
        """Append a row, in place of the oldest one if the buffer is full."""
        self._rows[self._pushed % len(self._rows)] = row
        self._pushed += 1

    def rows(self) -> npt.NDArray[Kind]:
        """Return the rows, oldest first."""
        if self._pushed <= len(self._rows):
            return self._rows[: self._pushed]
        return np.roll(self._rows, -(self._pushed % len(self._rows)), axis=0)
