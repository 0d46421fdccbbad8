"""Workloads run on an engine or against a server, and what they show."""

from __future__ import annotations

from tok_server.bench.workloads.result import Result, table
from tok_server.bench.workloads.workload import Workload, read_workload

__all__ = [
    "Result",
    "Workload",
    "read_workload",
    "table",
]
