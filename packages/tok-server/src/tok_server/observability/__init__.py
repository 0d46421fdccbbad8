"""Metrics, traces, logs and latencies of the server."""

from __future__ import annotations

from tok_server.observability.latency import KINDS, QUANTILES, Latencies
from tok_server.observability.log_format import FIELDS, log_to_stderr
from tok_server.observability.metrics import EngineStats, Metrics
from tok_server.observability.request_counts import COUNTS, RequestCounts
from tok_server.observability.ring import Ring
from tok_server.observability.telemetry import Telemetry

__all__ = [
    "COUNTS",
    "FIELDS",
    "KINDS",
    "QUANTILES",
    "EngineStats",
    "Latencies",
    "Metrics",
    "RequestCounts",
    "Ring",
    "Telemetry",
    "log_to_stderr",
]
