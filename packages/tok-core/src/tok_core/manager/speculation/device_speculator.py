"""Let the worker draft tokens by n-gram lookup and accept them, so that steps are sent ahead as without drafts.

Legend: n sequences with draft rows, k tokens of the longest draft.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from tok_core.config import MAX_DRAFT_TOKENS, MAX_DRAFTING
from tok_core.manager.kv_cache import Paging
from tok_core.manager.requests import Request
from tok_core.manager.sequences import DRAFT_MARGIN, SequenceTable
from tok_core.manager.speculation.drafts import (
    FAMILY_BITS,
    MAX_GUIDED_DRAFT,
    MIN_GUIDED_PROBABILITY,
    NO_ROWS,
    Drafts,
    LentRows,
    falling,
    family_of,
    longest_draft,
    no_tokens,
    reserve_pages,
)
from tok_core.manager.speculation.step_costs import StepCosts
from tok_core.messages import Float64, Int32, Int64, StepInput, StepOutput, VerifyRows

IDLE_STEPS: Final = 4  # steps, of which one considers drafts, once one that did so had none


class DeviceSpeculator:
    """Speculative decoding in which the worker predicts the drafted tokens and accepts them.

    The worker counts which token has followed which context, in prompts and in samples, finished ones included. For
    each sequence the manager only chooses how many decode rows verify drafts, each in an unused slot that is lent for
    the step. The worker predicts their tokens when the step begins, and moves each sequence past the accepted ones when
    it has sampled:

        last token b;  predicted c d;  rows (b, p) (c, p + 1) (d, p + 2) sample c, x, y:  c and x are kept

    So the next step need not wait for values. Until a step is back, the manager knows a sequence's `length` as if no
    draft was accepted, and reserves pages for `ahead` more positions. A sequence whose drafts in flight may bring it to
    its limit waits for them.

    Sampling is keyed by (seed, sample, position), so a row whose context is right samples the token of plain decoding.
    A drafted token is accepted if it equals the token sampled before it; the sampled token is kept either way. So a
    drafted token is accepted with its probability, as in rejection sampling from a deterministic draft (Leviathan et
    al. 2023). Tokens are those of plain decoding at every temperature, up to the rounding of steps of other sizes.

    The worker returns with each step which tokens it would have predicted, drafted or not. `PredictableShares`
    estimates from that the probability that the next one is right, and `StepCosts` chooses how many drafted tokens a
    step verifies.

    A guided sequence waits for the mask after each token anyway. The worker predicts the tokens that may follow, and
    the grammar's worker returns masks for those that the grammar allows: these are drafted (`draft_guided`).

    tokens  maximum tokens to draft for a sequence, by assumed step times; auto: by measured ones
    """

    waits = False
    active = False
    accepts_on_device = True

    def __init__(self, paging: Paging, tokens: int | Literal["auto"]) -> None:
        self.draft_steps = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.costs = StepCosts(measured=tokens == "auto", assumed_wait=0.0)
        self.shares = PredictableShares(paging.table)
        self._table = paging.table
        self._paging = paging
        self._max_draft = MAX_DRAFT_TOKENS if tokens == "auto" else tokens
        self.predicted_tokens = min(self._max_draft, MAX_GUIDED_DRAFT)
        self._in_flight = deque[Drafts]()
        # Slots of decode rows, their epochs, and slots that ask for predictions, of each step in flight.
        self._sent = deque[tuple[Int64, Int64, Int32]]()
        self._predicted = dict[int, Int32]()  # by slot: tokens predicted after the last token of guided sequences
        self._accepted_before = 0
        self._idle_turns = 0  # calls of `lend_rows` until one considers drafts of unguided sequences
        self._single = np.zeros(paging.table.slots, np.bool_)  # scratch

    @property
    def counters(self) -> tuple[int, int, int, int, int]:
        """Return `Speculation.counters`."""
        return self.draft_steps, self.drafted_tokens, self.accepted_tokens, 0, 0

    @property
    def drafts_ahead(self) -> bool:
        """Return whether a step in flight has drafts."""
        return bool(self._in_flight)

    def open(self, request: Request) -> None:
        """Set the request's family."""
        request.family = family_of(request)

    def lend_rows(self, step: int, decode: Int64, others: int, budget: int) -> LentRows:
        """Choose how many drafted tokens of which of `decode` the step verifies (`Speculation.lend_rows`)."""
        table, rows = self._table, len(decode) + others
        room = min(budget - rows, table.lendable_slots)
        self._idle_turns = max(self._idle_turns - 1, 0)
        if self._idle_turns and not table.guided[decode].any():
            return NO_ROWS
        if room <= 0 or not 0 < len(decode) <= MAX_DRAFTING or not self.costs.allows(rows):
            return NO_ROWS
        parents, count, given = self._choose(decode, rows, room)
        self._idle_turns = 0 if len(parents) else IDLE_STEPS
        length = table.length[parents] + table.ahead[parents] + 1 + count
        if not len(parents) or not reserve_pages(self._paging, parents, length):
            return NO_ROWS
        drafted = np.arange(count.max()) < count[:, None]
        slots, given = np.full(drafted.shape, -1), given[:, : drafted.shape[1]]
        row, column = drafted.nonzero()
        slots[drafted] = lent = table.lend(parents[row])
        table.length[lent] += 1 + column.astype(np.int32)
        table.ahead[parents] += count.astype(np.int32)
        for i in table.guided[parents[row]].nonzero()[0].tolist():
            table.draft_masks[int(lent[i])] = table.matchers[int(parents[row[i]])].ahead[column[i]]
        self._in_flight.append(Drafts(step, parents, table.epoch[parents], slots, given, 0))
        self.draft_steps += 1
        self.drafted_tokens += len(lent)
        verify_rows = VerifyRows(
            parents.astype(np.int32), slots.astype(np.int32), np.where(drafted, given, np.int32(-1))
        )
        return LentRows(lent, parents[row], verify_rows)

    def _choose(self, decode: Int64, rows: int, room: int) -> tuple[Int64, Int64, Int32]:
        """Return the sequences to draft for, the number of tokens of each, and those given, `[n, k]`."""
        table = self._table
        guided = table.guided[decode]
        parents = decode if not guided.any() else decode[~guided | (table.known[decode] == table.length[decode] + 1)]
        most = longest_draft(self._max_draft, len(parents))
        depth, given = np.arange(1, most + 1), no_tokens(len(parents), most)
        probability = self.shares.of(parents)[:, None] ** depth
        for i in table.guided[parents].nonzero()[0].tolist():
            matcher = table.matchers.get(int(parents[i]))
            allowed = 0 if matcher is None else min(len(matcher.ahead), most)
            probability[i] = 0
            if matcher is not None and allowed:
                given[i, :allowed], probability[i, :allowed] = (one[:allowed] for one in matcher.draft)
        left = table.limit[parents] - table.length[parents] - table.ahead[parents] - DRAFT_MARGIN
        probability[depth > left[:, None]] = 0
        order = falling(probability)[:room]
        used = np.zeros(probability.size, np.bool_)
        used[order[: self.costs.choose(rows, probability.ravel()[order])]] = True
        count: Int64 = used.reshape(probability.shape).sum(axis=1)
        drafting = count > 0
        return parents[drafting], count[drafting], given[drafting]

    def sent(self, step: StepInput) -> None:
        """Record the step, and forget the masks of its rows."""
        drafted = 0
        if step.verify_rows is not None:
            lent = self._in_flight[-1].lent
            self._table.held[lent] = False
            self._table.draft_masks.clear()
            drafted = len(lent)
        slots = step.decode_slot.astype(np.int64)
        self._sent.append((slots, self._table.epoch[slots], step.predict_slot))
        self.costs.sent(step, drafted, waited=False)

    def returned(self, output: StepOutput) -> Drafts | None:
        """Learn what the worker would have predicted; return the drafts that this step has verified, if any."""
        table, (slots, epoch, predict_slot) = self._table, self._sent.popleft()
        self._predicted = dict(zip(predict_slot.tolist(), output.predicted, strict=True))
        drafts = self._in_flight.popleft() if self._in_flight and self._in_flight[0].step == output.step else None
        single = self._single
        single[slots] = table.epoch[slots] == epoch  # a slot may have ended, or have a new sequence
        if drafts is not None:
            drafted = (drafts.slot >= 0).sum(axis=1)
            single[drafts.parent] = single[drafts.lent] = False
            live = table.epoch[drafts.parent] == drafts.epoch
            parents, accepted, drafted = drafts.parent[live], output.accepted[live], drafted[live]
            table.ahead[parents] -= drafted.astype(np.int32)
            self.shares.observe(parents, accepted, accepted + (accepted < drafted))
        alone = single[slots].nonzero()[0][:MAX_DRAFTING]
        single[slots] = False
        self.shares.observe(slots[alone], output.predictable[alone], np.ones(len(alone), np.int32))
        return drafts

    def verify(self, drafts: Drafts, rows: Int64, output: StepOutput) -> NDArray[np.bool_]:
        """Return which drafted tokens the worker has accepted."""
        right: NDArray[np.bool_] = np.arange(drafts.slot.shape[1]) < output.accepted[:, None]
        return right

    def count_accepted(self, drafts: Drafts, rows: Int64) -> None:
        """Count a token of each of these rows of the drafts as accepted."""
        self.accepted_tokens += len(rows)

    def note(self, slots: Int64, known: Int32) -> None:
        """Do nothing: the worker learns the tokens."""

    def observe(self, output: StepOutput, now: float) -> None:
        """Learn how long the oldest step in flight took."""
        accepted, self._accepted_before = self.accepted_tokens - self._accepted_before, self.accepted_tokens
        self.costs.returned(now, accepted, output.device_seconds, 0.0, output.capture_seconds)

    def learn(self, decode: Int64, in_flight: int) -> None:
        """Do nothing: no step waits."""

    def add_to_index(self) -> None:
        """Do nothing: the worker learns the tokens."""

    def draft_guided(self, slots: Int64) -> list[tuple[list[int], list[float]]]:
        """Return a draft for each guided sequence, from the worker's predictions (`Speculation.draft_guided`)."""
        drafts = list[tuple[list[int], list[float]]]()
        if not len(slots):
            return drafts
        for slot, share in zip(slots.tolist(), self.shares.of(slots).tolist(), strict=True):
            token = self._predicted.get(slot, NO_PREDICTION).tolist()
            chance = [share ** (i + 1) for i in range(len(token))]
            count = sum(one >= 0 and p >= MIN_GUIDED_PROBABILITY for one, p in zip(token, chance, strict=True))
            drafts.append((token[:count], chance[:count]))
        return drafts


NO_PREDICTION: Final[Int32] = np.empty(0, np.int32)
SLOT_WINDOW, FAMILY_WINDOW = 64.0, 256.0  # tokens that an estimate remembers; with more, its counts are halved
PRIOR: Final = 16.0  # tokens; weight of the family's share for a sequence, and of all families' share for a family


class PredictableShares:
    """Shares of tokens that the worker predicts, by sequence, by family and in all.

        share = (predicted tokens + PRIOR · share of the family) / (tokens + PRIOR)

    and likewise for a family, with the share of all.
    """

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._owner = np.full(table.slots, -1)  # epoch of the sequence that the counts belong to
        self._right, self._tokens = np.zeros((2, table.slots))
        self._family_right, self._family_tokens = np.zeros((2, 1 << FAMILY_BITS))
        self._all_right, self._all_tokens = 0.0, 1.0  # nothing is drafted before something was predictable

    def observe(self, slots: Int64, right: Int32, tokens: Int32) -> None:
        """Count tokens of different sequences, and those of them that were predicted."""
        if not len(slots):
            return
        self._start(slots)
        self._right[slots] += right
        self._tokens[slots] += tokens
        full = slots[self._tokens[slots] > SLOT_WINDOW]
        self._right[full] /= 2
        self._tokens[full] /= 2
        family = self._families(slots)
        np.add.at(self._family_right, family, right)
        np.add.at(self._family_tokens, family, tokens)
        full = np.unique(family[self._family_tokens[family] > FAMILY_WINDOW])
        self._family_right[full] /= 2
        self._family_tokens[full] /= 2
        self._all_right += float(right.sum())
        self._all_tokens += float(tokens.sum())
        if self._all_tokens > 16 * FAMILY_WINDOW:
            self._all_right, self._all_tokens = self._all_right / 2, self._all_tokens / 2

    def of(self, slots: Int64) -> Float64:
        """Return the probability of each sequence that the worker predicts its next token."""
        self._start(slots)
        family = self._families(slots)
        of_all = PRIOR * self._all_right / self._all_tokens
        of_family = PRIOR * (self._family_right[family] + of_all) / (self._family_tokens[family] + PRIOR)
        share: Float64 = (self._right[slots] + of_family) / (self._tokens[slots] + PRIOR)
        return share

    def _start(self, slots: Int64) -> None:
        """Forget the counts of sequences that the slots had before."""
        epoch = self._table.epoch[slots]
        other = slots[self._owner[slots] != epoch]
        if len(other):
            self._owner[other] = self._table.epoch[other]
            self._right[other] = self._tokens[other] = 0

    def _families(self, slots: Int64) -> Int64:
        family: Int64 = (self._table.family[slots] & np.uint64((1 << FAMILY_BITS) - 1)).astype(np.int64)
        return family
