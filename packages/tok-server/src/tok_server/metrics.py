"""What the server counts, as Prometheus reads it at /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

# name of the engine's statistic -> what it is; names without "_total" there, Prometheus adds it to counters
COUNTERS = {
    "requests_finished": "Requests the engine has ended.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts found in the prefix cache.",
    "output_tokens": "Tokens generated.",
    "discarded_tokens": "Tokens computed past the end of a sample, and thrown away.",
    "preemptions": "Samples interrupted for lack of memory.",
    "admissions_deferred": "Steps made without looking for samples to start, the worker being about to run dry.",
    "steps": "Forward passes.",
    "group_rows": "Tokens computed for an output as one of a group, which reads a shared prefix once.",
    "schedule_seconds": "Time taken to make steps.",
    "launch_seconds": "Time taken to launch them.",
    "device_seconds": "Time the device took for them, from the first operation of each to its last.",
    "output_seconds": "Time taken to take in what came of them.",
    "restarts": "Times a replica was started anew.",
}
GAUGES = {
    "requests_running": "Requests of which at least one sample runs.",
    "requests_waiting": "Requests waiting to run.",
    "sequences_running": "Samples that run.",
    "pages_total": "Pages of the KV cache.",
    "pages_used": "Pages of the KV cache that hold something needed.",
    "steps_in_flight": "Forward passes queued at the worker.",
}


class Metrics:
    """Counters and histograms of the HTTP side, beside the engine's own statistics.

    stats  returns the engine's statistics, or nothing while it has none
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.requests = Counter(
            "tok_http_requests", "HTTP requests answered.", ("endpoint", "status"), registry=self._registry
        )
        self.seconds = Histogram(
            "tok_request_seconds",
            "From a request's arrival to the end of its answer.",
            ("endpoint",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "tok_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=SECONDS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, text in COUNTERS.items():
            if name in stats:
                yield CounterMetricFamily(f"tok_{name}", text, value=stats[name])
        for name, text in GAUGES.items():
            if name in stats:
                yield GaugeMetricFamily(f"tok_{name}", text, value=stats[name])
