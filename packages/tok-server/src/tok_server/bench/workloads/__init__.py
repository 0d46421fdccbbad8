"""Run workloads on an engine or against a server and report the results."""

from __future__ import annotations

from tok_server.bench.workloads.result import Result, table
from tok_server.bench.workloads.workload import Workload, read_workload

__all__ = [
    "Result",
    "Workload",
    "read_workload",
    "table",
]
