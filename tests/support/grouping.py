"""Group short prompts, too, by leaving out the cost of a group."""

from __future__ import annotations

from tok_core.manager.loop import Manager
from tok_core.manager.prefix_groups.cascade import CPU_COSTS
from tok_core.manager.prefix_groups.grouping import Grouping, MostPagesSaved


def group_eagerly(manager: Manager) -> None:
    """Set the cost of groups to zero and of their members to one, if the manager groups at all."""
    scheduler, costs = manager.scheduler, CPU_COSTS._replace(member=1, group=0)
    scheduler.groupings = [Grouping(manager.paging.tree, MostPagesSaved(costs)) for _ in scheduler.groupings]
