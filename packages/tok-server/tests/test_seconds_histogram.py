"""SecondsHistogram exports the same lines as the Histogram of prometheus_client."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tok_server.observability.metrics import BOUNDS, SecondsHistogram

SECONDS = st.floats(0, 4000) | st.sampled_from(BOUNDS)


def told(registry: CollectorRegistry) -> set[str]:
    """Return the exported lines without the `_created` lines, which SecondsHistogram does not write."""
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SECONDS, st.sampled_from(["/a", 'b"\\'])), max_size=20))
@pytest.mark.parametrize("label", ["endpoint", None])
def test_seconds_histogram_exports_the_same_lines_as_prometheus_client(
    label: str | None, seen: list[tuple[float, str]]
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = SecondsHistogram("took_seconds", "What it took.", label=label)
    ours.register(times)
    histogram = Histogram("took_seconds", "What it took.", [label] if label else [], buckets=BOUNDS, registry=theirs)
    for seconds, of in seen:
        times.observe(seconds, *([of] if label else []))
        (histogram.labels(of) if label else histogram).observe(seconds)
    assert told(ours) == told(theirs)
