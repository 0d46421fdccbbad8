"""AdmissionPolicy: the protocol of admission rules; the rule of a fixed watermark; the choice of a rule by name."""

from __future__ import annotations

from itertools import islice
from typing import Protocol, assert_never

import numpy as np

from tok_core.config import AdmissionName
from tok_core.manager.admission.fair_shares import MAX_TURNS, StartTurn, Turns
from tok_core.manager.admission.forecast_admission import ForecastAdmission
from tok_core.manager.admission.length_model import LengthModel
from tok_core.manager.admission.sequence_starter import SequenceStarter
from tok_core.manager.faults import FaultyRequest


class AdmissionPolicy(Protocol):
    """Rule that decides how many waiting samples start in a step; `EngineConfig.admission` names the one in use."""

    def count(
        self, turns: Turns, cycle: float, budget: int, priority: int | None = None
    ) -> tuple[int, list[StartTurn]]:
        """Return how many of the waiting samples, of which there is one at least, may start now, and in which turns.

        turns     returns the turns, in order, in which a given number of samples start
        cycle     time in cycles: steps since the start, divided by the number of microbatches
        budget    tokens that the step may still compute; samples beyond these are not considered
        priority  lower classes than this one give up what they hold; None: no class does

        At least one sample may start if none runs: otherwise a sample larger than the rule allows would never start.
        """
        ...

    def observe(self, computed: int, recomputed: int) -> None:
        """Learn from the tokens computed so far, and from those of them that preemption had computed twice."""
        ...

    def refresh(self) -> None:
        """Learn how far the running samples are."""
        ...


WATERMARK = 0.01  # share of all pages that starting samples leave free: vLLM's default


class WatermarkAdmission:
    """Admission without a forecast, as in vLLM: a sample starts if its tokens and one page fit above a watermark.

    Running samples grow into the pages left free. If these run out, the sample with the least work to lose is preempted
    (`PreemptionPolicy`).
    """

    def __init__(self, starter: SequenceStarter) -> None:
        self._starter = starter

    def observe(self, computed: int, recomputed: int) -> None:
        """Learn nothing."""

    def refresh(self) -> None:
        """Learn nothing."""

    def count(
        self, turns: Turns, cycle: float, budget: int, priority: int | None = None
    ) -> tuple[int, list[StartTurn]]:
        """See `AdmissionPolicy`."""
        starter, table, paging = self._starter, self._starter.table, self._starter.paging
        slots, running, reserved = starter.startable(priority)
        if slots <= 0:
            return 0, []
        free = paging.available - int(WATERMARK * paging.num_pages) - sum(reserved.values())
        if priority is not None:  # lower classes give up the pages that only they hold
            lower = np.flatnonzero((table.num_pages > 0) & (table.priority > priority))
            free += int((table.num_pages[lower] - table.num_shared[lower]).sum())
        count, chosen = 0, list[StartTurn]()
        for turn in islice(turns(slots), MAX_TURNS):
            chosen.append(turn)
            try:
                first, others, tokens = starter.costs(*turn)
                pages = -(-len(turn.pending.tokens) // paging.page_size) + 1
            except Exception as error:
                raise FaultyRequest(turn.pending.request.rid, error) from error
            fitting = 0 if free < pages - first else min(turn.samples, 1 + (free - pages + first) // (pages - others))
            free -= fitting * (pages - others) + others - first
            count, budget = count + fitting, budget - tokens
            if fitting < turn.samples or budget <= 0:
                break
        return (count if len(running) else max(1, count)), chosen


def make_admission(name: AdmissionName, starter: SequenceStarter, lengths: LengthModel) -> AdmissionPolicy:
    """Return the policy `name` (`EngineConfig.admission`)."""
    match name:
        case "forecast":
            return ForecastAdmission(starter, lengths)
        case "watermark":
            return WatermarkAdmission(starter)
        case _:
            assert_never(name)
