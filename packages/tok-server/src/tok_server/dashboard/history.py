"""History: statistics of each of the last 120 seconds, and of every ten seconds of the last hour.

A row holds Unix time, `COLUMNS` of all replicas together, and `LATENCY` of the last ten seconds. With several replicas,
`COLUMNS` of each replica follow. Cells without a value are NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tok_server.observability import KINDS, QUANTILES, EngineStats, Ring

Floats = npt.NDArray[np.float64]
Stats = Mapping[str, float]

COLUMNS = ("input", "output", "requests", "samples", "queued", "pages", "hits", "ahead", "busy")
"""Columns of a row, for one replica or for all together:

input, output      prompt and output tokens per second
requests, samples  running requests and samples
queued             waiting requests
pages              share of the pages in use
hits               share of prompt tokens found in the prefix cache, over ten seconds
ahead              steps queued at the worker
busy               share of the time that the device worked
"""
LATENCY = tuple(f"{kind}_p{share * 100:.0f}" for kind in KINDS for share in QUANTILES)

SECOND_ROWS = 120
SECONDS_PER_ROW = 10  # seconds per row of the hour
HOUR_ROWS = 3600 // SECONDS_PER_ROW

COUNTERS = ("prompt_tokens", "output_tokens", "cached_tokens", "device_seconds")
PROMPT, OUTPUT, CACHED, DEVICE = range(len(COUNTERS))


class History:
    """Rows of statistics of one server with `replicas` replicas."""

    def __init__(self, replicas: int) -> None:
        self._replica_scopes = replicas if replicas > 1 else 0
        width = 1 + len(COLUMNS) + len(LATENCY) + self._replica_scopes * len(COLUMNS)
        self.seconds: Ring[np.float64] = Ring(SECOND_ROWS, (width,), np.float64)
        self.tens: Ring[np.float64] = Ring(HOUR_ROWS, (width,), np.float64)
        # Monotonic time, and the counters of each scope.
        self._before: deque[tuple[float, Floats]] = deque(maxlen=SECONDS_PER_ROW + 1)
        self._rows = 0

    def add(self, stats: EngineStats, latency: Sequence[float], *, time: float, clock: float) -> bool:
        """Add the second that ends at Unix `time`, monotonic `clock`. Return whether it completes a ten-second row."""
        scopes: list[Stats] = [stats.whole, *list(stats.replicas)[: self._replica_scopes]]
        scopes += [{}] * (1 + self._replica_scopes - len(scopes))
        counters = np.array([[scope.get(name, 0.0) for name in COUNTERS] for scope in scopes])
        if self._before and (counters < self._before[-1][1]).any():
            self._before.clear()
        rates = self._rates(counters, clock)
        if self._replica_scopes:
            rates[0, -1] = rates[1:, -1].mean()  # the mean, since each replica has devices of its own
        self._before.append((clock, counters))
        cells = [_cells(scope, rate) for scope, rate in zip(scopes, rates, strict=True)]
        self.seconds.push(np.concatenate([[time], cells[0], latency, *cells[1:]]))
        self._rows += 1
        if self._rows % SECONDS_PER_ROW:
            return False
        self.tens.push(_average_rows(self.seconds.rows()[-SECONDS_PER_ROW:]))
        return True

    def _rates(self, counters: Floats, clock: float) -> Floats:
        """Return the rates `[scope, (input, output, hits, busy)]`."""
        rates = np.zeros((len(counters), 4))
        rates[:, 2] = np.nan
        if not self._before:
            return rates
        last, oldest = self._before[-1], self._before[0]
        gained = (counters - last[1]) / max(clock - last[0], 1e-3)
        rates[:, 0], rates[:, 1] = gained[:, PROMPT], gained[:, OUTPUT]
        prompts, cached = (counters - oldest[1])[:, (PROMPT, CACHED)].T
        rates[:, 2] = np.where(prompts > 0, cached / np.maximum(prompts, 1), np.nan)
        rates[:, 3] = np.minimum(gained[:, DEVICE], 1.0)
        return rates


def _cells(stats: Stats, rate: Floats) -> list[float]:
    """Return one scope's `COLUMNS`."""
    total = stats.get("pages_total", 0.0)
    return [
        rate[0],
        rate[1],
        stats.get("requests_running", 0.0),
        stats.get("sequences_running", 0.0),
        stats.get("requests_waiting", 0.0),
        stats.get("pages_used", 0.0) / total if total else 0.0,
        rate[2],
        stats.get("steps_in_flight", 0.0),
        rate[3],
    ]


def _average_rows(rows: Floats) -> Floats:
    """Return the mean of cells with values. Time and latencies, which span ten seconds already, are the last row's."""
    known = ~np.isnan(rows)
    count = known.sum(0)
    mean: Floats = np.where(known, rows, 0.0).sum(0) / np.maximum(count, 1)
    mean[count == 0] = np.nan
    first = 1 + len(COLUMNS)
    mean[0] = rows[-1, 0]
    mean[first : first + len(LATENCY)] = rows[-1, first : first + len(LATENCY)]
    return mean
