"""Group decoding sequences by shared prefix for cascade attention."""

from __future__ import annotations

from tok_core.manager.prefix_groups.cascade import COSTS, CPU_COSTS
from tok_core.manager.prefix_groups.grouping import (
    NO_GROUPS,
    Grouping,
    Groups,
    MostPagesSaved,
    with_drafts,
)

__all__ = [
    "COSTS",
    "CPU_COSTS",
    "NO_GROUPS",
    "Grouping",
    "Groups",
    "MostPagesSaved",
    "with_drafts",
]
