"""Run the lines of batches through the engine; each line is answered once."""

from __future__ import annotations

from tok_server.batch.execution.all_lines import for_each_line
from tok_server.batch.execution.batch_run import BatchRun
from tok_server.batch.execution.budget import Budget
from tok_server.batch.execution.gate import EngineGate
from tok_server.batch.execution.line_runner import (
    ANSWERS_PER_GROUP,
    BatchResources,
    LineRunner,
    LineSource,
    sample_budget,
)
from tok_server.batch.execution.poison_isolation import PoisonIsolation
from tok_server.batch.execution.shielding import run_in, uninterrupted

__all__ = [
    "ANSWERS_PER_GROUP",
    "BatchResources",
    "BatchRun",
    "Budget",
    "EngineGate",
    "LineRunner",
    "LineSource",
    "PoisonIsolation",
    "for_each_line",
    "run_in",
    "sample_budget",
    "uninterrupted",
]
