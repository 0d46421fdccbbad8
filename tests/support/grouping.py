"""Groups of prompts that are too short to be worth them: the cost of a group is left out."""

from __future__ import annotations

from tok_core.manager.loop import Manager
from tok_core.manager.prefix_groups.cascade import COSTS
from tok_core.manager.prefix_groups.grouping import Grouping


def group_eagerly(manager: Manager) -> None:
    """Lets groups cost nothing and their members little, where the manager groups at all."""
    costs = COSTS._replace(member=1, group=0)
    scheduler = manager.scheduler
    scheduler.groupings = [Grouping(manager.paging.tree, costs) for _ in scheduler.groupings]
