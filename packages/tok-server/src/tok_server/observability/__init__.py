"""Metrics, traces, logs and latencies of the server."""

from __future__ import annotations

from tok_server.observability.metrics import EngineStats, Metrics
from tok_server.observability.request_stats import COUNTS, KINDS, QUANTILES, Latencies, RequestCounts
from tok_server.observability.telemetry import Telemetry

__all__ = ["COUNTS", "KINDS", "QUANTILES", "EngineStats", "Latencies", "Metrics", "RequestCounts", "Telemetry"]
