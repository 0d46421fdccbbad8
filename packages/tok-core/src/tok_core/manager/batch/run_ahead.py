"""RunAhead: how many steps are queued at the worker before their tokens are back."""

from __future__ import annotations

import math

from tok_core.config import MAX_STEPS_AHEAD

COVERED = 3e-3  # seconds of the worker's time that lie queued while the manager takes in a step and makes the next
MIN_QUEUED_STEPS, MAX_QUEUED_STEPS = 2, 8
WEIGHT = 0.1  # of the newest step in the mean


class RunAhead:
    """A number of steps given, or one that adapts to how long steps take.

    The worker never waits as long as the step it is at and those queued behind it last until the manager has sent
    another. Each step queued costs: sequences whose end is not back yet take part in it for nothing, and a request that
    arrives waits for it. So there are as many queued as take about 3 ms together, and the one that is under way: two
    where a step takes longer than that, eight at the most.

    Of a pipeline each of the `stages` is at another step, and one step more is spare; so many of those under way may
    wait for each other.
    """

    def __init__(self, fixed: int | None, stages: int = 1) -> None:
        self._fixed = fixed
        self._others = stages if stages > 1 else 0
        self._mean: float | None = None

    def observe(self, seconds: float) -> None:
        """A step has taken so long on the device, if its clock has not jumped: whatever takes longer than what is to
        lie queued makes no difference."""
        seconds = min(max(seconds, 0.0), 2 * COVERED)
        self._mean = seconds if self._mean is None else self._mean + WEIGHT * (seconds - self._mean)

    @property
    def steps(self) -> int:
        """Steps that may be queued now, those under way included."""
        return self.depth if self._fixed is not None else min(self.depth + self._others, MAX_STEPS_AHEAD)

    @property
    def depth(self) -> int:
        """How many of them may wait for each other, one for the one before it."""
        if self._fixed is not None:
            return self._fixed
        if self._mean is None:
            return MIN_QUEUED_STEPS
        queued = math.ceil(COVERED / max(self._mean, COVERED / MAX_QUEUED_STEPS))
        return min(max(1 + queued, MIN_QUEUED_STEPS), MAX_QUEUED_STEPS)
