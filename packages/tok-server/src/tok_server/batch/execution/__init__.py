"""Run the lines of batches through the engine; each line is answered once."""

from __future__ import annotations

from tok_server.batch.execution.batch_run import BatchRun
from tok_server.batch.execution.budget import Budget
from tok_server.batch.execution.gate import Gate
from tok_server.batch.execution.outcome import each_line
from tok_server.batch.execution.poison_isolation import PoisonIsolation
from tok_server.batch.execution.run import GROUP, BatchResources, LineSource, Run, sample_budget
from tok_server.batch.execution.shielding import uninterrupted

__all__ = [
    "GROUP",
    "BatchResources",
    "BatchRun",
    "Budget",
    "Gate",
    "LineSource",
    "PoisonIsolation",
    "Run",
    "each_line",
    "sample_budget",
    "uninterrupted",
]
