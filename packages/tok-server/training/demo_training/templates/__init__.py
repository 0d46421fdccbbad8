"""All templates: functions that make a problem from a ProblemSampler. Those of TEMPLATES have two to four steps."""

from __future__ import annotations

from collections.abc import Callable

from demo_training.problem import ProblemSampler, WordProblem
from demo_training.templates.arithmetic import arithmetic
from demo_training.templates.counting import classroom, collections, farm, garden, parking, sharing
from demo_training.templates.one_step import one_step
from demo_training.templates.rates import ages, baking, reading, tank, travelling
from demo_training.templates.spending import earning, halving, saving, shopping, tickets

__all__ = ["TEMPLATES", "arithmetic", "one_step"]

TEMPLATES: tuple[Callable[[ProblemSampler], WordProblem], ...] = (
    ages,
    baking,
    classroom,
    collections,
    earning,
    farm,
    garden,
    halving,
    parking,
    reading,
    saving,
    sharing,
    shopping,
    tank,
    tickets,
    travelling,
)
