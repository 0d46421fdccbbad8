"""Schedule steps: which tokens are computed, which samples start, and which sequences give up slots and pages."""

from __future__ import annotations

from tok_core.manager.scheduling.reclaimer import Reclaimer
from tok_core.manager.scheduling.scheduler import Scheduler

__all__ = [
    "Reclaimer",
    "Scheduler",
]
