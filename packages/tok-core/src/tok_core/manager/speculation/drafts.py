"""Define what the manager asks of speculative decoding (`Speculation`), and the drafts of a step.

Legend: n sequences with a draft, k tokens of the longest draft.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.kv_cache import Paging
from tok_core.manager.requests import Request
from tok_core.manager.sequences import NOBODY
from tok_core.manager.speculation.ngram_index import NO_TOKEN
from tok_core.messages import Int32, Int64, ModelDrafts, StepInput, StepOutput, VerifyRows

FAMILY_BITS: Final = 12  # last bits of a family's number; families that agree in them share their counts
SALT_BYTES: Final = 16  # of a caller's salt, if there is one; what `RequestIntake` appends is shorter
MAX_GUIDED_DRAFT: Final = 8  # drafted tokens of a guided sequence, each of which needs a mask
MIN_GUIDED_PROBABILITY: Final = 0.3  # acceptance probability of a token that is worth its mask
MAX_PREDICTED: Final = 1024  # drafted tokens considered for a step; with more sequences, drafts are shorter
MIN_DEPTH: Final = 4  # tokens considered for each sequence, however many there are


class LentRows(NamedTuple):
    """Decode rows that verify drafts in a step.

    slots         slots lent to drafted tokens
    sources       slots of the sequences that each stands for
    verify_rows   the rows, if the worker accepts the drafts
    model_drafts  what the draft model does before
    """

    slots: Int64 = NOBODY
    sources: Int64 = NOBODY
    verify_rows: VerifyRows | None = None
    model_drafts: ModelDrafts | None = None


NO_ROWS: Final = LentRows()


class Drafts(NamedTuple):
    """Drafts that a step verifies.

    step    number of the step
    parent  int64 [n], slots of the sequences
    epoch   int64 [n], their epochs
    slot    int64 [n, k], the slot lent to the decode row that feeds each drafted token; −1: none
    token   int32 [n, k], the drafted tokens, padded by NO_TOKEN; not known here if the worker accepts them
    models  the first sequences, whose tokens the draft model drafts: FROM_MODEL until the step returns
    """

    step: int
    parent: Int64
    epoch: Int64
    slot: Int64
    token: Int32
    models: int

    @property
    def lent(self) -> Int64:
        """Return the slots lent."""
        slots: Int64 = self.slot[self.slot >= 0]
        return slots


class Speculation(Protocol):
    """Speculative decoding, as the manager uses it.

    waits             whether the next step of a sequence waits for the values of its steps in flight
    predicted_tokens  tokens that the worker predicts for each guided sequence that samples
    accepts_on_device the worker advances sequences past accepted drafts
    """

    waits: bool
    predicted_tokens: int
    accepts_on_device: bool

    @property
    def counters(self) -> tuple[int, int, int, int, int]:
        """Return steps with drafts, drafted and accepted tokens, then those two of the draft model."""
        ...

    @property
    def active(self) -> bool:
        """Return whether steps in flight delay the next drafts."""
        ...

    @property
    def drafts_ahead(self) -> bool:
        """Return whether a step in flight has drafts, and yet delays no other."""
        ...

    def open(self, request: Request) -> None:
        """Take note of a new request."""
        ...

    def lend_rows(self, step: int, decode: Int64, others: int, budget: int) -> LentRows:
        """Draft tokens for some of `decode` in a step with `others` more tokens and at most `budget` in all.

        Each slot lent is filled like a sequence that feeds a drafted token next, and remains unused.
        """
        ...

    def sent(self, step: StepInput) -> None:
        """Record a step that was sent."""
        ...

    def returned(self, output: StepOutput) -> Drafts | None:
        """Return the drafts that this step has verified, if any."""
        ...

    def verify(self, drafts: Drafts, rows: Int64, output: StepOutput) -> NDArray[np.bool_]:
        """Return which drafted tokens are right, `[n, k]`.

        rows  int64 [n, 1 + k], the output's row of each sequence, and those of its drafted tokens
        """
        ...

    def count_accepted(self, drafts: Drafts, rows: Int64) -> None:
        """Count a token of each of these rows of the drafts as accepted."""
        ...

    def note(self, slots: Int64, known: Int32) -> None:
        """Take note of new tokens of sequences that have `known` tokens, with them."""
        ...

    def observe(self, output: StepOutput, now: float) -> None:
        """Learn how long the oldest step in flight took, once its drafts are accepted or rejected."""
        ...

    def learn(self, decode: Int64, in_flight: int) -> None:
        """Update `waits` after outputs have come back; `decode`: slots that decode in the next step."""
        ...

    def add_to_index(self) -> None:
        """Do what no step should wait for."""
        ...

    def draft_guided(self, slots: Int64) -> list[tuple[list[int], list[float]]]:
        """Return a draft for each guided sequence: tokens after its last known one, and their probabilities."""
        ...


def family_of(request: Request) -> int:
    """Return `Request.family`, 64 bits.

    The upper half stands for the caller's salt: requests of one salt learn from each other, also across changes of the
    weights. The lower half stands for the prompt: its samples are equally easy to predict.
    """
    salt = request.salt[:SALT_BYTES] if len(request.salt) >= SALT_BYTES else b""
    halves = (blake2b(one, digest_size=4).digest() for one in (salt, request.prompt.tobytes()))
    return int.from_bytes(b"".join(halves))


def reserve_pages(paging: Paging, slots: Int64, length: Int64) -> bool:
    """Allocate the pages of these lengths; return False, and allocate none, if too few are free or can be evicted.

    No sequence is preempted for drafts.
    """
    missing = -(-length // paging.page_size) - paging.table.num_pages[slots]
    total = int(missing[missing > 0].sum())
    if total > paging.available or not paging.evict_until_free(total):
        return False
    while len(short := slots[missing > 0]):
        paging.grow(short, paging.allocator.allocate(len(short)))
        missing -= 1
    return True


def longest_draft(max_draft: int, sequences: int) -> int:
    """Return how many tokens to consider for each of the sequences, so that the CPU's time is bounded."""
    return min(max_draft, max(MIN_DEPTH, MAX_PREDICTED // max(sequences, 1)))


def no_tokens(rows: int, count: int = 1) -> Int32:
    """Return drafts without tokens, `[rows, count]`."""
    return np.full((rows, count), NO_TOKEN, np.int32)


def falling(probability: NDArray[np.float64]) -> Int64:
    """Return the entries that are not 0, as indices of the flattened array, in falling order, to 1 / 65,535.

    NumPy sorts numbers of 16 bits in a third of the time of others.
    """
    rank = (65_535 - np.ceil(probability * 65_535)).astype(np.uint16)
    order: Int64 = np.argsort(rank, axis=None, kind="stable")[: np.count_nonzero(probability)]
    return order
