"""Choose how many steps are in flight, which sequences each computes in a pipeline, and how many tokens it may hold."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from tok_core.config import MAX_STEPS_AHEAD
from tok_core.manager.sequences import DRAFT_MARGIN, SequenceTable, State, microbatch_count
from tok_core.messages import Int64

QUEUED_SECONDS = 3e-3  # seconds of queued device time in which the manager processes an output and builds a step
DRAFT_QUEUED_SECONDS = 6e-3  # the same for steps with drafts, in which manager and worker have more to do
MIN_QUEUED_STEPS, MAX_QUEUED_STEPS = 2, 8  # the step in progress included
AVERAGE_WEIGHT = 0.1  # weight of the newest step in the moving average


class RunAhead:
    """Number of steps to queue: fixed, or adapted to how long steps take.

    The worker never waits if the step in progress and those queued behind it last until the manager has sent another.
    Each queued step has a cost: sequences whose end is not back yet take part in it for nothing, and an arriving
    request waits for it. So as many steps are queued as take about 3 ms together, besides the one in progress: one if
    a step takes longer than 3 ms, and seven at most.

    In a pipeline, `stages` more steps are in flight: each stage computes another one, and one more is spare. The number
    above then bounds how many of them may wait for each other.

    waits   whether the next step needs the values of all steps that it continues, for drafts: it is not queued behind
            them. Without a pipeline, it continues all steps in flight
    few     whether to queue two steps only, however short they are, since a draft waits for the values of all
    drafts  whether steps have drafts that wait for no values: DRAFT_QUEUED_SECONDS are queued
    """

    def __init__(self, fixed: int | None, stages: int = 1) -> None:
        self.waits = False
        self.few = False
        self.drafts = False
        self._fixed = fixed
        self._others = stages if stages > 1 else 0
        self._mean: float | None = None

    def observe(self, seconds: float) -> None:
        """Update the average with the device time of a step.

        The time is clamped to 0 … twice what is queued, since a clock may jump. Longer steps make no difference.
        """
        seconds = min(max(seconds, 0.0), 2 * self._queued_seconds)
        self._mean = seconds if self._mean is None else self._mean + AVERAGE_WEIGHT * (seconds - self._mean)

    @property
    def steps(self) -> int:
        """Return how many steps may be in flight now, those in progress included."""
        if self._fixed is not None and self._others:
            return self._fixed
        return min(self.depth + self._others, MAX_STEPS_AHEAD)

    @property
    def depth(self) -> int:
        """Return how many of these steps may form a chain in which each waits for the one before it."""
        if self.waits:
            return 1
        if self._fixed is not None:
            return self._fixed
        if self._mean is None or self.few:
            return MIN_QUEUED_STEPS
        queued = math.ceil(self._queued_seconds / max(self._mean, self._queued_seconds / MAX_QUEUED_STEPS))
        return min(max(1 + queued, MIN_QUEUED_STEPS), MAX_QUEUED_STEPS)

    @property
    def _queued_seconds(self) -> float:
        return DRAFT_QUEUED_SECONDS if self.drafts else QUEUED_SECONDS


MIN_MICROBATCH_ROWS = 8  # rows of a microbatch: fewer gain nothing by being computed separately
MIN_SPARE_ROWS = 128  # rows per microbatch from which on a spare one pays: reading the weights once more costs little
ROW_CONTEXT_TOKENS = 1024  # positions to attend to that cost about as much as the rest of a row
MAX_EXCESS_SHARE = 1 / 32  # fraction of its share by which a microbatch may exceed it


class Microbatches:
    """Assignment of the decoding sequences of `table` to `stages` + 1 microbatches, or to one without a pipeline.

    A step is one microbatch. Microbatches take turns, one per step: while one is computed at a stage, others are at the
    neighbouring stages. One more is spare, so that the tokens of the microbatch whose turn comes are back at the first
    stage. A sequence joins the microbatch of the step in which it samples first, so a prompt's samples stay together.
    Sequences beyond their microbatch's share, or of one no longer needed, move to the next one and wait one turn.

    turn      microbatch whose turn it is
    returned  last step whose tokens are back
    cycles    how often every sequence has had its turn; without microbatches, the number of steps
    """

    def __init__(self, table: SequenceTable, stages: int) -> None:
        self.count = microbatch_count(stages)
        self.fewest = MIN_MICROBATCH_ROWS
        self.returned = 0
        self.cycles = 0.0
        self.turn = 0
        self._table = table
        self._stages = stages
        self._sampled_upto = 0
        self._chains: deque[tuple[int, int]] = deque()  # steps in flight, each with the length of its chain of waiting

    def upcoming(self) -> Int64:
        """Return the slots whose sequences decode in the next step, held ones included, ascending."""
        slots = self._table.in_state(State.DECODE)
        if self.count == 1 or not len(slots):
            return slots
        turns = (self._table.microbatch[slots] - self.turn) % self.count
        next_slots: Int64 = slots[turns == turns.min()]
        return next_slots

    def rows(self) -> Int64:
        """Return the slots that decode in this turn, ascending, without held ones.

        Sequences that drafts in flight may bring to their limit wait, too.
        """
        table = self._table
        slots = table.in_state(State.DECODE)
        if table.held.any():
            slots = slots[~table.held[slots]]
        ahead = table.ahead[slots]
        if ahead.any():
            slots = slots[(ahead == 0) | (table.length[slots] + ahead + DRAFT_MARGIN <= table.limit[slots])]
        return slots if self.count == 1 else slots[table.microbatch[slots] == self.turn]

    def sitting_out(self, decode: Int64) -> Int64:
        """Return the guided slots of this turn that are not in `decode`, but would be without a grammar.

        Such sequences wait for a token's value, or prefill several tokens at once.
        """
        table = self._table
        if not table.guided.any():
            return np.empty(0, np.int64)
        among = table.guided & (table.length >= table.prompt_len)
        among &= (table.state == State.DECODE) | (table.state == State.PREFILL)
        among[decode] = False
        slots: Int64 = among.nonzero()[0]
        return slots if self.count == 1 else slots[table.microbatch[slots] == self.turn]

    def next_turn(self) -> None:
        """Pass the turn to the next microbatch."""
        self.turn = (self.turn + 1) % self.count

    def waits(self, depth: int) -> bool:
        """Return whether this turn's step would extend a chain of `depth` or more steps in flight.

        In a chain, each step feeds tokens that the one before it samples. Without this bound, all steps of a lone
        sequence would be queued one after another, and only delay requests that arrive.
        """
        if self.count == 1:
            return False
        while self._chains and self._chains[0][0] <= self.returned:
            self._chains.popleft()
        last = self._last(self.rows())
        return any(step == last and chain >= depth for step, chain in self._chains)

    def balance(self) -> None:
        """Move sequences to the next microbatch if this turn's exceeds its share or is no longer needed."""
        if self.count == 1:
            return
        table = self._table
        slots = table.in_state(State.DECODE)
        microbatch, cost = table.microbatch[slots], 1 + table.length[slots] / ROW_CONTEXT_TOKENS
        load = np.bincount(microbatch, cost, self.count)
        used, wanted = np.count_nonzero(load), self._wanted(len(slots))
        mine = microbatch == self.turn
        if not mine.any():
            return
        if used > wanted:
            leaving = mine if load[self.turn] == load[load > 0].min() else np.zeros_like(mine)
            table.microbatch[slots[leaving]] = (self.turn + 1) % self.count
            return
        share = load.sum() / wanted
        if load[self.turn] > share * (1 + MAX_EXCESS_SHARE) + cost[mine].max():
            oldest = np.argsort(table.order[slots[mine]])  # keeps samples of a request together
            before = np.cumsum(cost[mine][oldest]) - cost[mine][oldest]
            over = oldest[before >= share]  # only these: a sequence that no microbatch keeps would never decode
            table.microbatch[slots[mine][over]] = (self.turn + 1) % self.count

    def step(self, number: int, decode: Int64) -> int:
        """Register the step of this turn, of this number, in which `decode` slots decode; return its `sampled_upto`."""
        if self.count == 1:
            self.cycles += 1
            return number - 1
        last = self._last(decode)
        self._sampled_upto = max(self._sampled_upto, self.returned, last)
        chain = next((chain for step, chain in self._chains if step == last), 0)
        self._chains.append((number, chain + 1))
        microbatches = self._table.microbatch[self._table.in_state(State.DECODE)]
        used = int(np.count_nonzero(np.bincount(microbatches, minlength=self.count)))
        self.cycles += 1 / max(1, used)
        return self._sampled_upto

    def record_sampled(self, number: int, slots: Int64) -> None:
        """Record that these slots sample in step `number`, of this turn."""
        if self.count > 1:
            self._table.microbatch[slots] = self.turn
            self._table.last_sampled_step[slots] = number

    def _last(self, slots: Int64) -> int:
        """Return the last step in which any of the slots sampled."""
        return int(self._table.last_sampled_step[slots].max(initial=0))

    def _wanted(self, rows: int) -> int:
        """Return how many microbatches pay off for so many rows."""
        if rows >= MIN_SPARE_ROWS * self.count:
            return self.count
        return max(1, min(self._stages, -(-rows // self.fewest)))


MIN_STEP_TOKENS = 256  # tokens of a step: with fewer, reading the weights takes longer than the GEMMs


class TokenBudget:
    """Largest number of tokens in a pipeline step, so that successive steps take about equally long.

    Steps of different length make pipeline stages wait for each other, and the sequences of a short step wait until a
    long one has passed all stages. Prompts arrive irregularly, or start when others have freed pages. So a step holds
    no more prompt tokens than recent steps have needed; the rest follows in the next steps.

    The budget lies between MIN_STEP_TOKENS and `max_tokens`. With each step it grows by 1 / (2 · `microbatches`) of
    itself if prompts have used it up, and shrinks by as much otherwise. With one microbatch it is `max_tokens`.
    """

    def __init__(self, max_tokens: int, microbatches: int) -> None:
        self._max_tokens = max_tokens
        self._bound = float(max_tokens)
        self._change = 0.5 / microbatches if microbatches > 1 else 0.0

    @property
    def tokens(self) -> int:
        """Return the largest number of tokens of the next step."""
        return int(self._bound)

    def observe(self, *, exhausted: bool) -> None:
        """Adapt to a step. `exhausted`: prompts would have filled more than it was allowed."""
        self._bound *= 1 + self._change if exhausted else 1 - self._change
        self._bound = min(max(self._bound, MIN_STEP_TOKENS), self._max_tokens)
