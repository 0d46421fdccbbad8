"""SecondsHistogram: a Prometheus histogram of seconds; an observation takes well below a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

# Upper bounds of the buckets, in seconds.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
BOUND_LABELS = (*map(str, BOUNDS), "+Inf")


class SecondsHistogram(Collector):
    """A histogram, or one for each value of `label`. Only one thread may observe; others may collect."""

    def __init__(self, name: str, text: str, *, label: str | None = None) -> None:
        self._name, self._text = name, text
        self._label = label
        self._counts: dict[str, list[int]] = {} if label else {"": [0] * len(BOUND_LABELS)}
        self._sums: dict[str, float] = dict.fromkeys(self._counts, 0.0)

    def observe(self, seconds: float, label_value: str = "") -> None:
        """Count an observation for the label value `label_value`."""
        counts = self._counts.get(label_value)
        if counts is None:
            counts = self._counts[label_value] = [0] * len(BOUND_LABELS)
            self._sums[label_value] = 0.0
        counts[bisect_left(BOUNDS, seconds)] += 1
        self._sums[label_value] += seconds

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        for label_value, counts in list(self._counts.items()):
            buckets = list(zip(BOUND_LABELS, accumulate(counts), strict=True))
            family.add_metric([label_value] if self._label else [], buckets, self._sums[label_value])
        yield family
