"""Schedule steps: the tokens to compute, the samples to start, the slots and pages to take back."""

from __future__ import annotations

from tok_core.manager.scheduling.batch_builder import BatchBuilder
from tok_core.manager.scheduling.reclaimer import Reclaimer
from tok_core.manager.scheduling.scheduler import Scheduler
from tok_core.manager.scheduling.steps_in_flight import MIN_QUEUED_STEPS, Microbatches, RunAhead, TokenBudget

__all__ = [
    "MIN_QUEUED_STEPS",
    "BatchBuilder",
    "Microbatches",
    "Reclaimer",
    "RunAhead",
    "Scheduler",
    "TokenBudget",
]
