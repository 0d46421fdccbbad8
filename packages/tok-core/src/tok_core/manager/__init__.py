"""Schedule steps on the CPU, and turn the tokens they return into progress, stops and reports."""

from __future__ import annotations

from tok_core.manager.faults import MAX_LOOK_SECONDS, MIN_IDLE_LOOKS
from tok_core.manager.loop import Manager
from tok_core.manager.scheduling import MIN_QUEUED_STEPS, BatchBuilder

__all__ = [
    "MAX_LOOK_SECONDS",
    "MIN_IDLE_LOOKS",
    "MIN_QUEUED_STEPS",
    "BatchBuilder",
    "Manager",
]
