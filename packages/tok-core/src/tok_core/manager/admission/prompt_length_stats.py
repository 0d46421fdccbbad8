"""Estimate how much earlier or later samples of one prompt end than samples in general.

Samples of one prompt share a factor on their rate of ends (a gamma frailty; Vaupel, Manton and Stallard 1979). It is
the ratio of observed ends to the ends expected for the tokens that the samples have run. Running samples count, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.sequences import SINGLE_SAMPLE
from tok_core.messages import Int64

Float64 = NDArray[np.float64]

WEIGHT = 8.0  # ends, both expected and seen, that every row begins with


class PromptLengthStats:
    """Length statistics with a row for each open request of several samples; released rows are reused."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._seen = np.zeros(1)
        self._expected = np.zeros(1)
        self._running = np.zeros(1)

    def acquire(self, samples: int) -> int:
        """Return a row for so many samples of one prompt."""
        if samples == 1:
            return SINGLE_SAMPLE
        if not self._free:
            size = len(self._seen)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self._seen, self._expected, self._running = (
                np.concatenate((column, np.zeros(size))) for column in (self._seen, self._expected, self._running)
            )
        length_stats_row = self._free.pop()
        self._seen[length_stats_row] = self._expected[length_stats_row] = self._running[length_stats_row] = 0.0
        return length_stats_row

    def release(self, length_stats_row: int) -> None:
        """Release the row of a request whose samples have all ended or were cancelled."""
        if length_stats_row != SINGLE_SAMPLE:
            self._free.append(length_stats_row)

    def finish(self, length_stats_row: Int64, hazard: Float64, ended: NDArray[np.bool_]) -> None:
        """Add samples that have finished; `hazard`, [n], is the number of ends expected of each."""
        size = len(self._seen)
        self._seen += np.bincount(length_stats_row, ended, minlength=size)
        self._expected += np.bincount(length_stats_row, hazard, minlength=size)

    def run(self, length_stats_row: Int64, hazard: Float64) -> None:
        """Replace the running samples by these; `hazard`, [n], is the number of ends expected of each."""
        self._running = np.bincount(length_stats_row, hazard, minlength=len(self._seen)).astype(np.float64, copy=False)

    def rate(self, length_stats_row: Int64) -> Float64:
        """Return the factors on the rates of ends, float64 of the shape of `length_stats_row`."""
        rate = (self._seen + WEIGHT) / (self._expected + self._running + WEIGHT)
        rate[SINGLE_SAMPLE] = 1.0
        found: Float64 = rate[length_stats_row]
        return found
