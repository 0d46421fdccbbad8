"""Find out which samples a new token ends, by stop tokens or stop strings."""

from __future__ import annotations

from tok_core.manager.stops.stop_prefilter import TokenRows
from tok_core.manager.stops.stop_sets import END, MAYBE_STRING, STOP_ID, WITHIN, StopHit, StopSets

__all__ = [
    "END",
    "MAYBE_STRING",
    "STOP_ID",
    "WITHIN",
    "StopHit",
    "StopSets",
    "TokenRows",
]
