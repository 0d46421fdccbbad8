"""Draft the next tokens of sequences, and let decode rows of the next step verify them.

Legend: n sequences with a draft, k tokens of the longest draft.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.kv_cache import Paging
from tok_core.manager.requests import Request
from tok_core.manager.sequences import State
from tok_core.manager.speculation.ngram_index import MAX_CONTEXT, NO_TOKEN, NgramIndex, UInt64
from tok_core.messages import Int32, Int64

MAX_ROWS: Final = 256
"""Decode rows, drafts included, up to which a step verifies drafts. Small steps mostly read weights, so that further
rows cost little. Llama-1B on an H200: 64 rows take 1.6 ms, 128 take 2.0 ms, 256 take 2.6 ms."""
MIN_ACCEPTANCE: Final = 0.3
"""Probability of acceptance from which on a token is drafted. A step of Llama-1B with 32 rows on an H200 takes a fifth
longer for one more row per sequence."""
MIN_GAIN: Final = 0.5
"""Expected accepted tokens per decode row from which on a step verifies drafts, since no step runs ahead of it."""
ACCURACY_BITS: Final = 12  # families whose accuracy is kept apart, if their numbers differ in these bits
ACCURACY_WINDOW: Final = 64  # predictions after which older ones count half
PRIOR_RIGHT, PRIOR_WRONG = 3, 1  # predictions counted before any was made: a new family drafts four tokens
MAX_LEARNT: Final = 1024  # tokens of a step: with more rows than this, nothing is drafted before many have ended
MAX_PROMPT_TOKENS: Final = 8192  # of a prompt, its last ones: 0.3 µs each to learn, while no step is scheduled

NOBODY: Final[Int64] = np.empty(0, np.int64)


class Drafts(NamedTuple):
    """Drafts that a step verifies.

    step    number of the step
    parent  int64 [n], slots of the sequences
    epoch   int64 [n], their epochs
    slot    int64 [n, k], the slot lent to the decode row that feeds each drafted token
    token   int32 [n, k], the drafted tokens, padded by NO_TOKEN
    """

    step: int
    parent: Int64
    epoch: Int64
    slot: Int64
    token: Int32

    @property
    def lent(self) -> Int64:
        """Return the slots lent."""
        slots: Int64 = self.slot[self.token != NO_TOKEN]
        return slots


class Speculator:
    """Speculative decoding without a draft model: drafts come from an `NgramIndex` over prompts and their samples.

    A draft of k tokens adds k decode rows to the step, each in a slot that is free, lent for this step alone. Row i
    feeds the i-th drafted token at its position. It reads the sequence's own pages, to which all rows have written
    before any reads, and samples with the sequence's parameters, seed and sample number:

        known tokens … a b;  draft c d;  rows (b, p) (c, p + 1) (d, p + 2) sample c, x, y:  c and x are kept

    Sampling is keyed by (seed, sample, position), so a row whose context is right samples the token of plain decoding.
    A drafted token is accepted if it equals the token sampled there, which is kept either way. It is accepted with its
    probability, as in rejection sampling from a draft without randomness. The tokens are those of plain decoding at
    every temperature, up to the rounding of steps of another size.

    Drafts begin where a sequence's last token is known. So no step is launched until one with drafts is back, and none
    while steps are in flight after which enough can be drafted (`waits`). The slots lent are free again by then.

    Every token that a sample gets, drafted or not, shows whether the index predicted it. The share of right predictions
    in a family is the probability a that its next drafted token is accepted; aⁱ is that of the i-th. Tokens are drafted
    while it is high enough.

    Guided sequences have no drafts, since the masks after drafted tokens are not known.

    draft_steps      steps that verified drafts
    drafted_tokens   tokens drafted
    accepted_tokens  drafted tokens accepted; each saves its sample a step
    """

    def __init__(self, paging: Paging, max_draft: int) -> None:
        self.draft_steps = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.waits = False
        self.index = NgramIndex()
        self._table = paging.table
        self._paging = paging
        self._max_draft = max_draft
        self._right = np.full(1 << ACCURACY_BITS, float(PRIOR_RIGHT))
        self._wrong = np.full(1 << ACCURACY_BITS, float(PRIOR_WRONG))
        self._drafts: Drafts | None = None  # of the step in flight
        self._appended: list[tuple[Int64, Int64]] = []  # slots and positions of tokens to learn

    @property
    def counters(self) -> tuple[int, int, int]:
        """Return `draft_steps`, `drafted_tokens` and `accepted_tokens`."""
        return self.draft_steps, self.drafted_tokens, self.accepted_tokens

    def open(self, request: Request) -> None:
        """Learn the prompt of a new request. Requests of one prompt and salt form a family."""
        text = blake2b(request.prompt.tobytes(), digest_size=8, key=request.salt[:64])
        request.family = int.from_bytes(text.digest())
        self.index.add_text(request.family, request.prompt[-MAX_PROMPT_TOKENS:])

    def note(self, slots: Int64) -> None:
        """Take note of the last known token of each slot, which `learn` will learn; of some if there are very many."""
        slots = slots[:: max(1, -(-len(slots) // MAX_LEARNT))]
        self._appended.append((slots, self._table.known[slots].astype(np.int64) - 1))

    def learn(self, in_flight: int) -> None:
        """Learn the noted tokens; decide whether the next step waits for the steps in flight, to verify drafts.

        Call this before slots of ended sequences are assigned again.
        """
        table = self._table
        if self._appended:
            slots, position = (np.concatenate(part) for part in zip(*self._appended, strict=True))
            self._appended = []
            family, token = table.family[slots], table.tokens[slots, position]
            self._count(family, self.index.add(family, self._windows(slots, position), token), token)
        self.waits = self._drafts is not None
        decode = table.in_state(State.DECODE)
        room = min(table.free_slots, MAX_ROWS - len(decode))
        if in_flight and room > 0 and not self.waits:
            drafts = self._draft(decode[~table.guided[decode]], room, len(decode))
            self.waits = bool((drafts != NO_TOKEN).any())

    def propose(self, slots: Int64, count: int) -> Int32:
        """Return up to `count` tokens that may follow each slot's last known token, `[n, count]`."""
        table = self._table
        return self.index.draft(table.family[slots], self._windows(slots, table.known[slots]), count)

    def acceptance(self, slots: Int64, count: int) -> NDArray[np.float64]:
        """Return the probabilities that the first `count` drafted tokens of each slot are accepted, `[n, count]`."""
        at = _accuracy_entry(self._table.family[slots])
        accuracy = self._right[at] / (self._right[at] + self._wrong[at])
        probability: NDArray[np.float64] = accuracy[:, None] ** np.arange(1, count + 1)
        return probability

    def lend_rows(self, step: int, decode: Int64, room: int) -> Int64:
        """Draft tokens for those of `decode` whose last token is known; return slots of the at most `room` draft rows.

        Each of these slots is filled like a sequence that feeds a drafted token next, and remains free.
        """
        table, room = self._table, min(room, self._table.free_slots, MAX_ROWS - len(decode))
        parents = decode[(table.known[decode] == table.length[decode] + 1) & ~table.guided[decode]]
        if room <= 0 or not len(parents):
            return NOBODY
        token = self._draft(parents, room, len(decode))
        parents, token = parents[token[:, 0] != NO_TOKEN], token[token[:, 0] != NO_TOKEN]
        drafted = token != NO_TOKEN
        if not len(parents) or not self._grow(parents, drafted.sum(axis=1)):
            return NOBODY
        row, column = drafted.nonzero()
        slots = np.full(token.shape, -1)
        slots[drafted] = lent = table.lend(parents[row])
        table.length[lent] += 1 + column.astype(np.int32)
        table.known[lent] = table.length[lent] + 1
        table.tokens[lent, table.length[lent]] = token[drafted]
        self._paging.show(parents[row], lent)
        self._drafts = Drafts(step, parents, table.epoch[parents], slots, token)
        self.waits = True
        self.draft_steps += 1
        self.drafted_tokens += len(lent)
        return lent

    def returned(self, step: int) -> Drafts | None:
        """Return the drafts that this step has verified, and give the slots back that were lent for it."""
        drafts = self._drafts
        if drafts is None or drafts.step != step:
            return None
        self._drafts = None
        for slot in drafts.lent.tolist():
            self._table.requests[slot] = None
        return drafts

    def _draft(self, slots: Int64, room: int, rows: int) -> Int32:
        """Return drafts of at most `room` tokens together, `[n, k]`; no tokens if they gain too little for `rows`.

        No token is drafted that the limit of its sequence forbids.
        """
        token, left = self.propose(slots, self._max_draft), self._table.limit[slots] - self._table.known[slots]
        acceptance = self.acceptance(slots, self._max_draft)
        token[(np.arange(self._max_draft) + 1 >= left[:, None]) | (acceptance < MIN_ACCEPTANCE)] = NO_TOKEN
        while token.shape[1] > 1 and np.count_nonzero(token != NO_TOKEN) > room:
            token = token[:, :-1]
        token[room:] = NO_TOKEN
        if acceptance[:, : token.shape[1]].sum(where=token != NO_TOKEN) < MIN_GAIN * rows:
            token.fill(NO_TOKEN)
        return token

    def _count(self, family: UInt64, predicted: Int32, token: Int32) -> None:
        """Count which predictions were right."""
        at, made = _accuracy_entry(family), predicted != NO_TOKEN
        if made.any():
            right = predicted == token
            self._right += np.bincount(at[right], minlength=len(self._right))
            self._wrong += np.bincount(at[made & ~right], minlength=len(self._wrong))
            old = self._right + self._wrong > ACCURACY_WINDOW
            self._right[old] /= 2
            self._wrong[old] /= 2

    def _grow(self, slots: Int64, drafted: Int64) -> bool:
        """Allocate the pages that the sequences lack for their drafts, if there are enough; return whether there are.

        Nothing is preempted for drafts.
        """
        paging, length = self._paging, self._table.length[slots] + 1 + drafted
        short = (-(-length // paging.page_size) > self._table.num_pages[slots]).nonzero()[0].tolist()
        missing = sum(paging.missing(int(slots[i]), int(length[i])) for i in short)
        if missing > paging.available or not paging.evict_until_free(missing):
            return False
        for i in short:
            paging.reserve(int(slots[i]), int(length[i]))
        return True

    def _windows(self, slots: Int64, end: Int64 | Int32) -> Int32:
        """Return the tokens of each slot before position `end`, the last one first, `[W, n]`."""
        position = end - 1 - np.arange(MAX_CONTEXT)[:, None]
        windows: Int32 = np.where(position >= 0, self._table.tokens[slots, np.maximum(position, 0)], np.int32(NO_TOKEN))
        return windows


def _accuracy_entry(family: UInt64) -> Int64:
    entry: Int64 = (family >> np.uint64(64 - ACCURACY_BITS)).astype(np.int64)
    return entry
