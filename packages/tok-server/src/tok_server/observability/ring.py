"""Ring: the last rows that were pushed, in memory that does not grow."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Kind = TypeVar("Kind", bound=np.generic)


class Ring(Generic[Kind]):
    """At most `size` rows of one shape."""

    def __init__(self, size: int, shape: tuple[int, ...], dtype: type[Kind]) -> None:
        self._rows: npt.NDArray[Kind] = np.zeros((size, *shape), dtype)
        self._pushed = 0

    def __len__(self) -> int:
        return min(self._pushed, len(self._rows))

    def push(self, row: npt.NDArray[Kind]) -> None:
        """The oldest goes where there is no room."""
        self._rows[self._pushed % len(self._rows)] = row
        self._pushed += 1

    def rows(self) -> npt.NDArray[Kind]:
        """Those that are there, the oldest first."""
        if self._pushed <= len(self._rows):
            return self._rows[: self._pushed]
        return np.roll(self._rows, -(self._pushed % len(self._rows)), axis=0)
