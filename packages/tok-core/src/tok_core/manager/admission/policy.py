"""AdmissionPolicy: the protocol of admission rules, and what each of them needs to know of waiting samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from tok_core.manager.admission.fair_shares import StartTurn
from tok_core.manager.admission.waiting_queue import WaitingQueue
from tok_core.manager.kv_cache import Paging, RetainedPrompts
from tok_core.manager.sequences import Pending, SequenceTable, State
from tok_core.messages import Int64

LOOK_AHEAD = 4096  # turns of the queue that are considered per step

Turns = Callable[[int], Iterator[StartTurn]]


class AdmissionPolicy(Protocol):
    """Rule that decides how many waiting samples start in a step; `EngineConfig.admission` names the one in use."""

    def count(
        self,
        turns: Turns,
        waiting: WaitingQueue,
        reserved: dict[int, int],
        cycle: float,
        budget: int,
        priority: int | None = None,
    ) -> tuple[int, list[StartTurn]]:
        """Return how many of the waiting samples may start now, and the turns in which they do.

        turns     returns the turns, in order, in which a given number of samples start
        reserved  number of forks still to come for each prefilling leader (by slot): they count as running
        cycle     time in cycles: steps since the start, divided by the number of microbatches
        budget    tokens that the step may still compute; samples beyond these are not considered
        priority  lower classes than this one give up what they hold; None: no class does

        At least one sample may start if none runs: otherwise a sample larger than the rule allows would wait for ever.
        """
        ...

    def account(self, computed: int, recomputed: int) -> None:
        """Learn from the tokens computed so far, and from those of them that preemption had computed twice."""
        ...

    def refresh(self) -> None:
        """Learn how far the running samples are."""
        ...


class Startable(NamedTuple):
    """Slots that waiting samples may take, and the running samples and forks to come that keep theirs."""

    slots: int
    running: Int64
    reserved: dict[int, int]


def startable(table: SequenceTable, reserved: dict[int, int], priority: int | None) -> Startable:
    """Return what may start as far as slots go; the arguments are those of `AdmissionPolicy.count`."""
    running = np.concatenate((table.in_state(State.PREFILL), table.in_state(State.DECODE)))
    slots = table.free_slots
    if priority is not None:
        lower = table.priority[running] > priority
        slots += int(lower.sum()) + int(np.count_nonzero(table.state == State.PREEMPTED))
        running = running[~lower]
        reserved = {slot: forks for slot, forks in reserved.items() if table.priority[slot] <= priority}
    return Startable(slots - sum(reserved.values()), running, reserved)


class SampleCosts(NamedTuple):
    """Pages that the `first` of some samples and each of the `others` shares; tokens that they all compute."""

    first: int
    others: int
    tokens: int


def sample_costs(paging: Paging, retained_prompts: RetainedPrompts, pending: Pending, samples: int) -> SampleCosts:
    """Return the costs of the first `samples` samples of `pending`.

    If the first has to prefill, it shares the pages that running sequences hold anyway; pages that are only cached
    count as its own. The others share the prompt's full pages with it. Samples that start late share them with the
    retained prompt.
    """
    size, tokens = paging.page_size, len(pending.tokens)
    full, others = (tokens - 1) // size, tokens // size
    if pending.fresh and retained_prompts.find(pending.request) is not None:
        return SampleCosts(full, full, samples)
    if pending.fresh and pending.request.leader is not None:
        return SampleCosts(others, others, 0)
    if pending.fresh and pending.request.needs_all:
        return SampleCosts(0, others, tokens)
    locked, cached = paging.tree.depths(pending.tokens[: full * size], pending.request.salt)
    return SampleCosts(locked, others, tokens - cached * size)
