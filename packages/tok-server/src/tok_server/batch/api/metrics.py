"""Prometheus metrics of batches: how many there are by status, and the progress of their lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class BatchStats(NamedTuple):
    """Counts by state.

    open      batches that have not ended, by status
    ended     batches that have ended since the start, by status
    lines     unanswered lines of batches in progress: "waiting" and "running"
    answered  lines answered since the start: "completed" and "failed"
    """

    open: Mapping[str, int]
    ended: Mapping[str, int]
    lines: Mapping[str, int]
    answered: Mapping[str, int]


class BatchCollector(Collector):
    """Prometheus collector that calls `stats` at each scrape."""

    def __init__(self, stats: Callable[[], BatchStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Yield four metric families."""
        stats = self._stats()
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        text = "Lines of batches answered since the start, by result."
        yield _family(gauge, "tok_batches", "Batches that have not ended, by their status.", "status", stats.open)
        yield _family(counter, "tok_batches_ended", "Batches ended since the start, by status.", "status", stats.ended)
        yield _family(
            gauge, "tok_batch_lines", "Lines of open batches without an answer, by state.", "state", stats.lines
        )
        yield _family(counter, "tok_batch_lines_answered", text, "result", stats.answered)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, int],
) -> Metric:
    family = kind(name, text, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family
