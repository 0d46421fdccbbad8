"""History: statistics of each of the last 120 seconds, and of every ten seconds of the last hour.

A row holds Unix time, `COLUMNS` of all replicas together, `LATENCY` of the last ten seconds, and `SERVER_COLUMNS`. With
several replicas, `COLUMNS` of each replica follow. Cells without a value are NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tok_server.observability import KINDS, QUANTILES, EngineStats

Floats = npt.NDArray[np.float64]
Stats = Mapping[str, float]

COLUMNS = (
    *("input", "output", "requests", "samples", "queued"),
    *("pages", "cached", "hits", "ahead", "busy", "preempted"),
)
"""Columns of a row, for one replica or for all together:

input, output      prompt and output tokens per second
requests, samples  running requests and samples
queued             waiting requests
pages              share of the pages of the KV cache in use
cached             share of the pages that are only kept for prompts that begin alike
hits               share of prompt tokens found in the prefix cache, over ten seconds
ahead              steps queued at the worker
busy               share of the time that the device worked
preempted          samples preempted in this second
"""
LATENCY = tuple(f"{kind}_p{share * 100:.0f}" for kind in KINDS for share in QUANTILES)

SERVER_COLUMNS = ("server_errors", "client_errors", "refused", "batch_lines")
"""Columns of a row, for the whole server:

server_errors  answers of the API with a status from 500 in this second
client_errors  the same with a status from 400, without requests whose clients left
refused        requests and connections that a limit refused in this second
batch_lines    lines of open batches without an answer
"""

SECOND_ROWS = 120
SECONDS_PER_ROW = 10  # seconds per row of the hour
HOUR_ROWS = 3600 // SECONDS_PER_ROW

COUNTERS = ("prompt_tokens", "output_tokens", "cached_tokens", "device_seconds", "preemptions")
PROMPT, OUTPUT, CACHED, DEVICE, PREEMPTIONS = range(len(COUNTERS))
HITS, BUSY, PREEMPTED = 2, 3, 4  # columns of `History._rates`


class History:
    """Rows of statistics of one server with `replicas` replicas."""

    def __init__(self, replicas: int) -> None:
        self._replica_scopes = replicas if replicas > 1 else 0
        self.seconds: deque[Floats] = deque(maxlen=SECOND_ROWS)
        self.tens: deque[Floats] = deque(maxlen=HOUR_ROWS)
        # Monotonic time, and the counters of each scope.
        self._before: deque[tuple[float, Floats]] = deque(maxlen=SECONDS_PER_ROW + 1)
        self._rows = 0

    def add(
        self, stats: EngineStats, latency: Sequence[float], server: Sequence[float], *, time: float, clock: float
    ) -> bool:
        """Add the second that ends at Unix `time`, monotonic `clock`. Return whether it completes a ten-second row.

        latency, server  its `LATENCY` and `SERVER_COLUMNS`
        """
        scopes: list[Stats] = [stats.whole, *list(stats.replicas)[: self._replica_scopes]]
        scopes += [{}] * (1 + self._replica_scopes - len(scopes))
        counters = np.array([[scope.get(name, 0.0) for name in COUNTERS] for scope in scopes])
        if self._before and (counters < self._before[-1][1]).any():
            self._before.clear()
        rates = self._rates(counters, clock)
        if self._replica_scopes:
            rates[0, BUSY] = rates[1:, BUSY].mean()  # the mean, since each replica has devices of its own
        self._before.append((clock, counters))
        cells = [_cells(scope, rate) for scope, rate in zip(scopes, rates, strict=True)]
        self.seconds.append(np.concatenate([[time], cells[0], latency, server, *cells[1:]]))
        self._rows += 1
        if self._rows % SECONDS_PER_ROW:
            return False
        self.tens.append(_average_rows(np.array(list(self.seconds)[-SECONDS_PER_ROW:])))
        return True

    def _rates(self, counters: Floats, clock: float) -> Floats:
        """Return the rates `[scope, (input, output, hits, busy, preempted)]`."""
        rates = np.zeros((len(counters), 5))
        rates[:, HITS] = np.nan
        if not self._before:
            return rates
        last, oldest = self._before[-1], self._before[0]
        gained = (counters - last[1]) / max(clock - last[0], 1e-3)
        rates[:, 0], rates[:, 1] = gained[:, PROMPT], gained[:, OUTPUT]
        rates[:, PREEMPTED] = counters[:, PREEMPTIONS] - last[1][:, PREEMPTIONS]
        prompts, cached = (counters - oldest[1])[:, (PROMPT, CACHED)].T
        # At most 1: prompts are counted when they arrive, cached tokens when they start, which may be later.
        rates[:, HITS] = np.where(prompts > 0, np.minimum(cached / np.maximum(prompts, 1), 1.0), np.nan)
        rates[:, BUSY] = np.minimum(gained[:, DEVICE], 1.0)
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
        stats.get("pages_cached", 0.0) / total if total else 0.0,
        rate[HITS],
        stats.get("steps_in_flight", 0.0),
        rate[BUSY],
        rate[PREEMPTED],
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
