"""Choose how many steps are queued at the worker before their tokens are back."""

from __future__ import annotations

import math

from tok_core.config import MAX_STEPS_AHEAD

COVERED = 3e-3  # seconds of queued device time that cover the manager's taking in a step and building the next
MIN_QUEUED_STEPS, MAX_QUEUED_STEPS = 2, 8  # the step in progress included
WEIGHT = 0.1  # weight of the newest step in the moving average


class RunAhead:
    """Number of steps to queue: fixed, or adapted to how long steps take.

    The worker never waits if the step in progress and those queued behind it last until the manager has sent another.
    Each queued step has a cost: sequences whose end is not back yet take part in it for nothing, and an arriving
    request waits for it. So as many steps are queued as take about 3 ms together, besides the one in progress. That is
    two steps in all if a step takes longer than 3 ms, and eight at most.

    In a pipeline, `stages` more steps are in flight: each stage computes another one, and one more is spare. The number
    above then bounds how many of them may wait for each other.
    """

    def __init__(self, fixed: int | None, stages: int = 1) -> None:
        self._fixed = fixed
        self._others = stages if stages > 1 else 0
        self._mean: float | None = None

    def observe(self, seconds: float) -> None:
        """Update the average with the device time of a step.

        The time is clamped to 0 … 2 · COVERED, since a clock may jump. Longer steps make no difference.
        """
        seconds = min(max(seconds, 0.0), 2 * COVERED)
        self._mean = seconds if self._mean is None else self._mean + WEIGHT * (seconds - self._mean)

    @property
    def steps(self) -> int:
        """Return how many steps may be in flight now, those in progress included."""
        return self.depth if self._fixed is not None else min(self.depth + self._others, MAX_STEPS_AHEAD)

    @property
    def depth(self) -> int:
        """Return how many of these steps may form a chain in which each waits for the one before it."""
        if self._fixed is not None:
            return self._fixed
        if self._mean is None:
            return MIN_QUEUED_STEPS
        queued = math.ceil(COVERED / max(self._mean, COVERED / MAX_QUEUED_STEPS))
        return min(max(1 + queued, MIN_QUEUED_STEPS), MAX_QUEUED_STEPS)
