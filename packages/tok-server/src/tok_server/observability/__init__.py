"""Metrics, traces, logs and latencies of the server."""
