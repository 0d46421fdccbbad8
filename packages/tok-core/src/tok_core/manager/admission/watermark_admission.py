"""Admit samples while the pages that they need now leave a share of the cache free, as vLLM does."""

from __future__ import annotations

from itertools import islice

import numpy as np

from tok_core.manager.admission.fair_shares import StartTurn
from tok_core.manager.admission.policy import LOOK_AHEAD, Turns, sample_costs, startable
from tok_core.manager.admission.waiting_queue import WaitingQueue
from tok_core.manager.faults import FaultyRequest
from tok_core.manager.kv_cache import Paging, RetainedPrompts
from tok_core.manager.sequences import SequenceTable

WATERMARK = 0.01  # share of all pages that starting samples leave free: vLLM's default


class WatermarkAdmission:
    """Admission without a forecast: a sample starts if its tokens and one page more fit above the watermark.

    Running samples grow into the pages left free. If these run out, the sample with the least work to lose is preempted
    (`PreemptionPolicy`).
    """

    def __init__(self, table: SequenceTable, paging: Paging, retained_prompts: RetainedPrompts) -> None:
        self._table = table
        self._paging = paging
        self._retained_prompts = retained_prompts

    def account(self, computed: int, recomputed: int) -> None:
        """Learn nothing."""

    def refresh(self) -> None:
        """Learn nothing."""

    def count(
        self,
        turns: Turns,
        waiting: WaitingQueue,
        reserved: dict[int, int],
        cycle: float,
        budget: int,
        priority: int | None = None,
    ) -> tuple[int, list[StartTurn]]:
        """See `AdmissionPolicy`."""
        table, paging = self._table, self._paging
        slots, running, reserved = startable(table, reserved, priority)
        if slots <= 0 or not waiting:
            return 0, []
        free = paging.available - int(WATERMARK * paging.num_pages) - sum(reserved.values())
        if priority is not None:  # lower classes give up the pages that only they hold
            lower = np.flatnonzero((table.num_pages > 0) & (table.priority > priority))
            free += int((table.num_pages[lower] - table.num_shared[lower]).sum())
        count, chosen = 0, list[StartTurn]()
        for turn in islice(turns(slots), LOOK_AHEAD):
            chosen.append(turn)
            try:
                first, others, tokens = sample_costs(paging, self._retained_prompts, *turn)
                pages = -(-len(turn.pending.tokens) // paging.page_size) + 1
            except Exception as error:
                raise FaultyRequest(turn.pending.request.rid, error) from error
            fitting = 0 if free < pages - first else min(turn.samples, 1 + (free - pages + first) // (pages - others))
            free -= fitting * (pages - others) + others - first
            count, budget = count + fitting, budget - tokens
            if fitting < turn.samples or budget <= 0:
                break
        return (count if len(running) else max(1, count)), chosen
