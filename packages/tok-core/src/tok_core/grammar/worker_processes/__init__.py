"""Compile and follow untrusted grammars in worker processes with resource limits."""

from __future__ import annotations

from tok_core.grammar.worker_processes.examiner import process_checker
from tok_core.grammar.worker_processes.processes import WorkerLost, WorkerProcesses
from tok_core.grammar.worker_processes.worker import COMPILING, IDLE

__all__ = [
    "COMPILING",
    "IDLE",
    "WorkerLost",
    "WorkerProcesses",
    "process_checker",
]
