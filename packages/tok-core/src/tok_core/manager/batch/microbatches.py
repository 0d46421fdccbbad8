"""Assign running sequences to the microbatches of a pipeline.

A step is one microbatch. Microbatches take turns, one per step: while one is computed at a stage, others are at the
neighbouring stages. One more is spare, so that the tokens of the microbatch whose turn comes are back at the first
stage. A sequence joins the microbatch of the step in which it samples first, so a prompt's samples stay together.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tok_core.manager.sequences import SequenceTable, State
from tok_core.messages import Int64

MIN_MICROBATCH_ROWS = 8  # rows of a microbatch: fewer gain nothing by being computed separately
SPARE = 128  # rows per microbatch from which on reading the weights once more, for the spare one, costs little
CONTEXT = 1024  # positions to attend to that cost about as much as the rest of a row
SLACK = 1 / 32  # fraction of its share by which a microbatch may exceed it


class Microbatches:
    """Assignment of the decoding sequences of `table` to `stages` + 1 microbatches, or to one without a pipeline.

    Sequences beyond their microbatch's share, or of one no longer needed, move to the next one and wait one turn.

    turn      microbatch whose turn it is
    used      microbatches that had sequences at the last step, at least 1
    returned  last step whose tokens are back
    cycles    how often every sequence has had its turn; without microbatches, the number of steps
    """

    def __init__(self, table: SequenceTable, stages: int) -> None:
        self.count = stages + 1 if stages > 1 else 1
        self.fewest = MIN_MICROBATCH_ROWS
        self.returned = 0
        self.cycles = 0.0
        self.turn = 0
        self.used = 1
        self._table = table
        self._stages = stages
        self._sampled_upto = 0
        self._chains: deque[tuple[int, int]] = deque()  # steps in flight, each with the length of its chain of waiting

    def rows(self) -> Int64:
        """Return the slots that decode in this turn, ascending, without held ones."""
        slots = self._table.in_state(State.DECODE)
        if self._table.held.any():
            slots = slots[~self._table.held[slots]]
        return slots if self.count == 1 else slots[self._table.microbatch[slots] == self.turn]

    def sitting_out(self, decode: Int64) -> Int64:
        """Return the guided slots of this turn that are not in `decode`, but would be without a grammar.

        They wait for a token's value, or prefill several tokens at once.
        """
        table = self._table
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
        """Move sequences to the next microbatch if this turn's one exceeds its share or is no longer needed."""
        if self.count == 1:
            return
        table = self._table
        slots = table.in_state(State.DECODE)
        microbatch, cost = table.microbatch[slots], 1 + table.length[slots] / CONTEXT
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
        if load[self.turn] > share * (1 + SLACK) + cost[mine].max():
            oldest = np.argsort(table.order[slots[mine]])  # keeps samples of a request together
            before = np.cumsum(cost[mine][oldest]) - cost[mine][oldest]
            over = oldest[before >= share]  # no more than these: sequences that no microbatch keeps would never decode
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
        self.used = max(1, int(np.count_nonzero(np.bincount(microbatches, minlength=self.count))))
        self.cycles += 1 / self.used
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
        if rows >= SPARE * self.count:
            return self.count
        return max(1, min(self._stages, -(-rows // self.fewest)))
