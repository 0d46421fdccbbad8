"""Build each step: rows, token budget, pipeline microbatches, run-ahead."""

from __future__ import annotations

from tok_core.manager.batch.batch_builder import BatchBuilder, Changes
from tok_core.manager.batch.microbatches import Microbatches
from tok_core.manager.batch.run_ahead import MIN_QUEUED_STEPS, RunAhead
from tok_core.manager.batch.token_budget import TokenBudget

__all__ = [
    "MIN_QUEUED_STEPS",
    "BatchBuilder",
    "Changes",
    "Microbatches",
    "RunAhead",
    "TokenBudget",
]
