"""Metrics of the server for Prometheus, served at /metrics.

The engine's statistics appear twice. For example, `tok_steps_total` sums all replicas; `tok_replica_steps_total` is for
the replica in its label `replica`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tok_server.observability.request_stats import RequestCounts

# Upper bounds of histogram buckets: seconds of requests, seconds between tokens, and numbers of tokens.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
LENGTH_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

API_PREFIX = "/v1/"  # endpoints whose errors `Metrics.errors` counts: probes and scanners ask for others

# Name of the engine's statistic -> help text. Prometheus appends "_total" to the names of counters.
COUNTERS = {
    "requests_finished": "Requests that the engine has finished.",
    "prompt_tokens": "Prompt tokens.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "output_tokens": "Output tokens.",
    "skipped_tokens": "Output tokens that a grammar determined, so that they were not sampled.",
    "discarded_tokens": "Tokens computed past the end of a sample, and discarded.",
    "draft_steps": "Forward passes that verified drafted tokens.",
    "drafted_tokens": "Rows of forward passes that --speculate added, one for each drafted token.",
    "accepted_tokens": "Drafted tokens that were accepted; each saved its sample a forward pass.",
    "model_drafted_tokens": "Tokens that the model of --draft has drafted.",
    "model_accepted_tokens": "Tokens that the model of --draft has drafted and that were accepted.",
    "preemptions": "Samples preempted for lack of memory.",
    "steps": "Forward passes.",
    "group_rows": "Decode rows in groups that read the pages of a shared prefix once.",
    "schedule_seconds": "Seconds that scheduling steps took.",
    "launch_seconds": "Seconds that launching steps took.",
    "device_seconds": "Seconds that steps took on the device, each from its first operation to its last.",
    "output_seconds": "Seconds that processing the output of steps took.",
    "expert_mean_tokens": "Tokens of an expert in the mean, added up over layers of the steps that counted them.",
    "expert_max_tokens": "The same of the expert with most tokens: divided by the mean, how uneven routing is.",
    "expert_rank_max_tokens": "The same of the experts of one rank in the mean, of the rank with most, with --ep.",
    "restarts": "Restarts of replicas.",
}
GAUGES = {
    "requests_running": "Requests with at least one running sample.",
    "requests_waiting": "Requests that wait to run.",
    "sequences_running": "Running samples.",
    "pages_total": "Pages of the KV cache.",
    "pages_used": "Pages of the KV cache in use.",
    "pages_cached": "Pages of the KV cache that no sample uses, kept for prompts that begin alike.",
    "steps_in_flight": "Forward passes queued at the worker.",
    "missing_graphs": "CUDA graphs not captured yet at the last forward pass; an idle worker captures them.",
}
WHOLE_GAUGES = {"replicas": "Replicas of the model.", "replicas_ready": "Replicas that serve."}
REPLICA_GAUGES = {"ready": "Whether the replica serves: 1 or 0."}
REPLICA = "replica"


class BucketHistogram(Collector):
    """A histogram, or one for each value of `label`. Only one thread may observe; others may collect."""

    def __init__(self, name: str, text: str, bounds: Sequence[float] = BOUNDS, *, label: str | None = None) -> None:
        self._name, self._text = name, text
        self._bounds = bounds
        self._bound_labels = (*map(str, bounds), "+Inf")
        self._label = label
        self._counts: dict[str, list[int]] = {} if label else {"": [0] * len(self._bound_labels)}
        self._sums: dict[str, float] = dict.fromkeys(self._counts, 0.0)

    def observe(self, value: float, label_value: str = "", *, times: int = 1) -> None:
        """Count `times` equal observations for the label value `label_value`."""
        counts = self._counts.get(label_value)
        if counts is None:
            counts = self._counts[label_value] = [0] * len(self._bound_labels)
            self._sums[label_value] = 0.0
        counts[bisect_left(self._bounds, value)] += times
        self._sums[label_value] += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        for label_value, counts in list(self._counts.items()):
            buckets = list(zip(self._bound_labels, accumulate(counts), strict=True))
            family.add_metric([label_value] if self._label else [], buckets, self._sums[label_value])
        yield family


class EngineStats(NamedTuple):
    """Statistics of the engine: for all replicas together, and for each by its number. Empty before it has started."""

    whole: Mapping[str, float] = {}
    replicas: Sequence[Mapping[str, float]] = ()


class Metrics:
    """Counters and histograms of the HTTP server, with the engine's own statistics as returned by `stats`.

    inter_token  seconds between successive tokens of a streamed answer
    errors       answers of the API since the start, by their status from 400
    refusals     refused requests and connections since the start, by limit
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._by_answer: dict[tuple[str, int], Counter] = {}
        self._registry.register(_EngineCollector(stats))
        self.requests = Counter(
            "tok_http_requests", "HTTP requests answered.", ("endpoint", "status"), registry=self._registry
        )
        self.errors: Tally[int] = Tally()
        self.refusals: Tally[str] = Tally()
        self._seconds = self._histogram(
            "request_seconds", "From a request's arrival to the end of its answer.", label="endpoint"
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Streamed answers: from one group of new tokens of a prompt, as they reach the stream, to the next. "
            "A group holds the tokens that a step gives to the prompt's samples, or more if the client is slow.",
            TOKEN_BOUNDS,
        )
        each = "Answered requests, one observation per prompt: "
        self._prompt_seconds = (  # in the order of PromptSeconds
            self._histogram("request_queue_time_seconds", each + "from its submission until it begins to run."),
            self._histogram("request_prefill_time_seconds", each + "from its beginning to run to its first token."),
            self._histogram(
                "request_decode_time_seconds", each + "from its first token to the end of its last sample."
            ),
            self._histogram(
                "request_time_per_output_token_seconds",
                each + "decode time divided by the tokens after the first of its longest sample.",
                TOKEN_BOUNDS,
            ),
        )
        self._prompt_tokens = self._histogram("request_prompt_tokens", each + "its tokens.", LENGTH_BOUNDS)
        self._generation_tokens = self._histogram(
            "request_generation_tokens",
            "Answered requests, one observation per sample: its output tokens.",
            LENGTH_BOUNDS,
        )
        ProcessCollector(registry=self._registry)
        self.refused = Counter(
            "tok_refused",
            "Requests and connections that were refused or cut off, by the limit that they exceeded.",
            ("limit",),
            registry=self._registry,
        )
        self.connections = Gauge("tok_connections", "Open connections of clients.", registry=self._registry)

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float] = BOUNDS, *, label: str | None = None
    ) -> BucketHistogram:
        histogram = BucketHistogram("tok_" + name, text, bounds, label=label)
        self.add(histogram)
        return histogram

    def add(self, more: Collector) -> None:
        """Render this collector's metrics, too."""
        self._registry.register(more)

    def ended(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        found = self._by_answer.get((endpoint, status))
        if found is None:  # cached: the lookup takes longer than the increment
            found = self._by_answer[endpoint, status] = self.requests.labels(endpoint, str(status))
        found.inc()
        self._seconds.observe(seconds, endpoint)
        if status >= 400 and endpoint.startswith(API_PREFIX):
            self.errors[status] += 1

    def answered(self, counts: RequestCounts) -> None:
        """Record times and lengths of a request that was answered successfully."""
        for prompt in counts.prompts:
            for histogram, seconds in zip(self._prompt_seconds, prompt, strict=True):
                if seconds is not None:
                    histogram.observe(seconds)
        for histogram, lengths in (
            (self._prompt_tokens, counts.prompt_lengths),
            (self._generation_tokens, counts.sample_lengths),
        ):
            for tokens, times in Tally(lengths).items():  # thousands of samples have few different lengths
                histogram.observe(tokens, times=times)

    def began(self, seconds: float) -> None:
        """Record a request's time to first token, in seconds."""
        self._first_token.observe(seconds)

    def refuse(self, limit: str | None) -> None:
        """Count a request or connection refused by a limit; None: no limit was the reason."""
        if limit is not None:
            self.refused.labels(limit).inc()
            self.refusals[limit] += 1

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        whole, replicas = self._stats()
        each = {str(number): stats for number, stats in enumerate(replicas)}
        yield from _families("tok_", {"": whole}, (), {**GAUGES, **WHOLE_GAUGES})
        yield from _families("tok_replica_", each, (REPLICA,), {**GAUGES, **REPLICA_GAUGES})


def _families(
    prefix: str, stats: Mapping[str, Mapping[str, float]], labels: tuple[str, ...], gauges: Mapping[str, str]
) -> Iterable[Metric]:
    """Yield a family for each statistic that is present. `stats`: label value -> statistics; "" without labels."""
    for kind, texts in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, gauges)):
        for name, text in texts.items():
            family = kind(prefix + name, text, labels=labels)
            for label, values in stats.items():
                if name in values:
                    family.add_metric((label,)[: len(labels)], values[name])
            if family.samples:
                yield family
