"""Returns: what the tokens that come back from the worker mean for their sequences and requests."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from tok_core.manager.borders import Rows
from tok_core.manager.lengths import LengthModel
from tok_core.manager.scheduler import Scheduler
from tok_core.manager.sequences import SequenceTable, State
from tok_core.manager.stops import END, MAYBE_STRING, STOP_ID, WITHIN, StopHit, StopSets
from tok_core.messages import Finished, Int64, StepInput, StepOutput
from tok_core.outputs import FinishReason


class Reported(NamedTuple):
    """Tokens of one step that still belong to somebody, in columns, and the samples that they end."""

    rid: np.ndarray
    sample: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    finished: list[Finished]


class Returns:
    """Takes StepOutputs in the order of their StepInputs. Tokens of slots freed meanwhile are dropped."""

    def __init__(self, table: SequenceTable, scheduler: Scheduler, stops: StopSets, lengths: LengthModel) -> None:
        self.table = table
        self.scheduler = scheduler
        self.stops = stops
        self.lengths = lengths
        self.in_flight: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self.output_tokens = 0
        self.discarded_tokens = 0
        self.requests_finished = 0

    def expect(self, step: StepInput) -> None:
        """The step was sent: remembers whose tokens it will return."""
        slots = step.sample_slot
        self.in_flight.append((step.step, slots, self.table.epoch[slots]))

    def take(self, output: StepOutput) -> Reported:
        """Stores the step's tokens, ends what they end, and returns what is to be reported."""
        number, slots, epoch = self.in_flight.popleft()
        assert number == output.step, f"step {output.step} returned where {number} was expected"
        live = self.table.epoch[slots] == epoch
        slots = slots[live].astype(np.int64)
        token = output.token[live]
        self.output_tokens += len(slots)
        self.discarded_tokens += len(live) - len(slots)
        self.table.tokens[slots, self.table.known[slots]] = token
        self.table.known[slots] += 1
        rid, sample = self.table.rid[slots], self.table.sample[slots]
        finished = self._finish(slots, token)
        self._requeue(slots)
        return Reported(
            rid,
            sample,
            token,
            output.logprob[live],
            output.top_token[live],
            output.top_logprob[live],
            finished,
        )

    def _finish(self, slots: Int64, token: np.ndarray) -> list[Finished]:
        """Ends the sequences among `slots` that their new token ends."""
        table = self.table
        known = table.known[slots]
        kind = self.stops.classify(table.stop_set[slots], token)
        kind = np.where(known > table.min_total[slots], kind, 0)
        self._rule_out(slots, kind)
        rows = ((kind != 0) | (known >= table.limit[slots])).nonzero()[0]
        finished = [self._finished(int(slots[i]), int(token[i]), int(kind[i])) for i in rows]
        over = np.array([one is not None for one in finished], np.bool_)
        ended = [one for one in finished if one is not None]
        if ended:
            self._learn(slots[rows[over]], np.array([one.reason != "length" for one in ended]))
            self._end(slots[rows[over]])
        return ended

    def _rule_out(self, slots: Int64, kind: np.ndarray) -> None:
        """Takes MAYBE_STRING from those of `kind` that what stands before the new token speaks against."""
        table = self.table
        maybe = (kind & (MAYBE_STRING | WITHIN) == MAYBE_STRING).nonzero()[0]
        if not len(maybe):
            return
        of = slots[maybe]
        rows = Rows(table.tokens, of, table.prompt_len[of], table.known[of] - 1)
        over = maybe[~self.stops.possible(table.stop_set[of], rows)]
        kind[over] &= END | STOP_ID

    def _learn(self, slots: Int64, ended: np.ndarray) -> None:
        """From the lengths of sequences that are over; not all have `ended` of their own."""
        table = self.table
        prompt, known, limit = table.prompt_len[slots], table.known[slots], table.limit[slots]
        columns = (table.followed[slots], known - prompt, limit - prompt)
        seen, lengths, limits = (column.astype(np.int64) for column in columns)
        self.lengths.observe(seen, lengths, limits, ended, table.family[slots])

    def _finished(self, slot: int, token: int, kind: int) -> Finished | None:
        """How the slot's new token ends its sequence, if it does."""
        table = self.table
        end: _End | None = None
        # A stop string that ends with an end token still has to be cut from the text.
        if kind & MAYBE_STRING and (hit := self._find_string(slot)) is not None:
            end = ("stop", hit.stop, hit.cut)
        elif kind & (END | STOP_ID):
            end = ("stop", None if kind & END else token, None)
        elif table.known[slot] >= table.limit[slot]:
            end = ("length", None, None)
        if end is None:
            return None
        tokens = int(table.known[slot] - table.prompt_len[slot])
        return Finished(int(table.rid[slot]), int(table.sample[slot]), end[0], tokens, *end[1:])

    def _find_string(self, slot: int) -> StopHit | None:
        table = self.table
        generated = table.tokens[slot, table.prompt_len[slot] : table.known[slot]]
        return self.stops.find(int(table.stop_set[slot]), generated)

    def _end(self, slots: Int64) -> None:
        """Takes the slots of sequences that have ended back, and what their requests hold with the last of them."""
        table = self.table
        # The worker computes nothing for a sequence after its end: what the last token would add is not in the cache.
        table.length[slots] = np.minimum(table.length[slots], table.known[slots] - 1)
        for slot in slots.tolist():
            request = table.requests[slot]
            assert request is not None
            request.left -= 1
            if request.left == 0:
                assert request.stop_set is not None
                self.stops.release(request.stop_set)
                self.lengths.families.release(request.family)
                self.requests_finished += 1
        self.scheduler.release(slots)

    def _requeue(self, slots: Int64) -> None:
        """Preempted sequences whose last scheduled token is back wait for a slot again."""
        table = self.table
        back = slots[table.state[slots] == State.PREEMPTED]
        for slot in back[table.known[back] > table.length[back]].tolist():
            self.scheduler.starts.requeue(slot)


_End = tuple[FinishReason, int | str | None, int | None]
