"""Guides: how far each guided sequence has followed its grammar, and which tokens may come next.

Legend: S slots, W words of a packed set of tokens, n sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.grammar.library import Library
from tok_core.manager.sequences import Request, SequenceTable
from tok_core.messages import Int32, Int64

if TYPE_CHECKING:
    import xgrammar

    from tok_core.grammar.compiler import Compiled, Compiler

Bools = NDArray[np.bool_]
NO_MASKS: Int32 = np.empty((0, 0), np.int32)
LOOK = 2e-3  # seconds between looks at grammars that are being compiled


class Follower:
    """One sequence: its place in its grammar, and tokens that are to come before it has a choice again, last first."""

    __slots__ = ("guide", "matcher", "plan")

    def __init__(self, guide: Compiled) -> None:
        self.guide = guide
        self.matcher = guide.matcher()
        self.plan: list[int] = []

    def look_ahead(self) -> None:
        """Plans the text that has to follow, if there is one: as the tokenizer would write it."""
        text = self.matcher.find_jump_forward_string()
        if len(text) > 1:
            self.plan = list(reversed(self.guide.lead(text)))


class Followed(NamedTuple):
    """What guided sequences may do after their newest token, bool [n] each.

    forced  there is no choice about what comes next: `token`, int32 [n]
    stuck   nothing may come next: the grammar cannot be followed on with this vocabulary
    """

    forced: Bools
    token: Int32
    stuck: Bools


class Guides:
    """Of the sequences in `table` whose requests have a grammar; `load` makes the compiler, once one has.

    A request whose grammar is being compiled waits here, beside the queue; others of its class may pass it.
    """

    def __init__(self, table: SequenceTable, vocab_size: int, load: Callable[[], Compiler]) -> None:
        self._table = table
        self._words = -(-vocab_size // 32)
        # Of the last word, xgrammar (0.2.8) also sets bits that stand for no token.
        self._last = np.uint32((1 << (vocab_size - 32 * (self._words - 1))) - 1).view(np.int32)
        self._library = Library(load)
        self._masks = NO_MASKS  # [S, W] once there is a grammar; memory only as far as slots are used
        self._threads: xgrammar.BatchGrammarMatcher | None = None
        self.waiting: dict[int, Request] = {}
        self.failed: list[tuple[int, str]] = []  # requests whose grammars could not be compiled, and why: to be told of

    def admit(self, request: Request) -> bool:
        """Whether the request may join the queue; if not, it waits here for its grammar, or has failed."""
        grammar = request.params.grammar
        if grammar is None:
            return True
        try:
            request.guide = self._library.find(grammar)
        except Exception as error:  # others are not to die of it
            self.failed.append((request.rid, f"the grammar cannot be compiled: {type(error).__name__}: {error}"))
            return False
        if request.guide is None:
            self.waiting[request.rid] = request
        return request.guide is not None

    def admitted(self) -> list[Request]:
        """Requests that have waited here and may join the queue now, in order of arrival."""
        found = [request for request in self.waiting.values() if self.admit(request)]
        for rid in [*(request.rid for request in found), *(rid for rid, _ in self.failed)]:
            self.waiting.pop(rid, None)
        waited_for = {request.params.grammar for request in self.waiting.values()}
        self._library.sweep({grammar for grammar in waited_for if grammar is not None})
        return found

    def close(self) -> None:
        """Ends its thread."""
        self._library.close()

    @property
    def _batch(self) -> xgrammar.BatchGrammarMatcher:
        if self._threads is None:
            import xgrammar  # takes seconds the first time, which have passed when a grammar has been compiled

            self._threads = xgrammar.BatchGrammarMatcher()
        return self._threads

    def masks(self, slots: Int64) -> Int32:
        """The tokens that may come next, packed, int32 [n, W]: all tokens so far are known of these sequences."""
        if not len(self._masks):
            self._masks = np.zeros((self._table.slots, self._words), np.int32)
        for slot in slots.tolist():
            if slot not in self._table.followers:
                self._begin(slot)
        return self._masks[slots]

    def _begin(self, slot: int) -> None:
        """The sequence draws its first token, or draws on after it has lost its slot."""
        table = self._table
        request = table.requests[slot]
        assert request is not None
        assert request.guide is not None
        follower = table.followers[slot] = Follower(request.guide)
        tokens = table.tokens[slot, table.prompt_len[slot] : table.known[slot]].tolist()
        self._masks[slot] = request.guide.first
        for token in tokens:
            follower.matcher.accept_token(token)
        if tokens:
            follower.matcher.fill_next_token_bitmask(self._masks, slot)
        self._masks[slot, -1] &= self._last

    def follow(self, slots: Int64, token: Int32) -> Followed:
        """Each of the sequences has got a token. In its stead one that cannot come is told of as stuck."""
        followers = [self._table.followers[slot] for slot in slots.tolist()]
        taken = self._batch.batch_accept_token([one.matcher for one in followers], token.tolist())
        forced = np.array([bool(one.plan) for one in followers], np.bool_)
        found = np.array([one.plan.pop() if one.plan else 0 for one in followers], np.int32)
        stuck = ~np.array(taken, np.bool_)
        unplanned = (~forced & ~stuck).nonzero()[0]
        if len(unplanned):
            single, alone, none = self._choices([followers[i] for i in unplanned], slots[unplanned])
            forced[unplanned], found[unplanned], stuck[unplanned] = single, alone, none
        for i in unplanned[~(forced | stuck)[unplanned]].tolist():
            followers[i].look_ahead()
            if followers[i].plan:
                forced[i], found[i] = True, followers[i].plan.pop()
        return Followed(forced & ~stuck, found, stuck)

    def _choices(self, followers: Sequence[Follower], slots: Int64) -> tuple[Bools, Int32, Bools]:
        """Fills the masks of the slots; which have one token, which one that is, and which have none."""
        self._masks[slots] = 0
        matchers = [one.matcher for one in followers]
        self._batch.batch_fill_next_token_bitmask(matchers, self._masks, slots.tolist())
        self._masks[slots, -1] &= self._last
        masks_nW = self._masks[slots]
        filled = masks_nW != 0
        count, word = filled.sum(axis=1), filled.argmax(axis=1)
        bits = masks_nW[np.arange(len(masks_nW)), word].view(np.uint32).astype(np.int64)
        single = (count == 1) & (bits & (bits - 1) == 0)
        return single, (word * 32 + np.log2(np.maximum(bits, 1))).astype(np.int32), count == 0
