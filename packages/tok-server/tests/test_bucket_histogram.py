"""BucketHistogram exports the same lines as the Histogram of prometheus_client."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tok_server.observability.metrics import BOUNDS, BucketHistogram

SECONDS = st.floats(0, 4000) | st.sampled_from(BOUNDS)


def told(registry: CollectorRegistry) -> set[str]:
    """Return the exported lines without the `_created` lines, which BucketHistogram does not write."""
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SECONDS, st.sampled_from(["/a", 'b"\\'])), max_size=20))
@pytest.mark.parametrize("label", ["endpoint", None])
def test_bucket_histogram_exports_the_same_lines_as_prometheus_client(
    label: str | None, seen: list[tuple[float, str]]
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = BucketHistogram("took_seconds", "What it took.", label=label)
    ours.register(times)
    histogram = Histogram("took_seconds", "What it took.", [label] if label else [], buckets=BOUNDS, registry=theirs)
    for seconds, of in seen:
        times.observe(seconds, *([of] if label else []))
        (histogram.labels(of) if label else histogram).observe(seconds)
    assert told(ours) == told(theirs)


def test_bucket_histogram_counts_equal_values_at_once() -> None:
    once, each = CollectorRegistry(), CollectorRegistry()
    for registry, times in ((once, [5]), (each, [1] * 5)):
        lengths = BucketHistogram("tokens", "Lengths.", (1.0, 10.0))
        registry.register(lengths)
        for count in times:
            lengths.observe(7, times=count)
    assert told(once) == told(each)
