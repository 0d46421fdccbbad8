"""Guides: how far each guided sequence has followed its grammar, and which tokens may come next.

Legend: W words of a packed set of tokens, n sequences, m different masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.grammar.library import Library
from tok_core.manager.follower import Follower
from tok_core.manager.masks import Masks
from tok_core.manager.sequences import Request, SequenceTable
from tok_core.messages import EMPTY, Int32, Int64

if TYPE_CHECKING:
    import xgrammar

    from tok_core.grammar.compiler import Compiler

Bools = NDArray[np.bool_]
LOOK = 2e-3  # seconds between looks at grammars that are being compiled
SKIP = 3  # tokens in a row, without a choice, that are computed at once: fewer are drawn one by one in decode rows
MOST = 512  # tokens after which no more are looked for in one go


class StepMasks(NamedTuple):
    """The masks of a step's guided rows: each of them once, packed, int32 [m, W], and which each row has, int32 [n]."""

    words: Int32
    which: Int32


NO_MASKS = StepMasks(EMPTY.reshape(0, 0), EMPTY)


class Followed(NamedTuple):
    """What comes next in guided sequences, of each n.

    runs   tokens about which there is no choice, and that nobody need draw; often none
    stuck  whether nothing may come after these: the grammar cannot be followed on with this vocabulary; bool [n]
    """

    runs: list[list[int]]
    stuck: Bools


class Guides:
    """Of the sequences in `table` whose requests have a grammar; `load` makes the compiler, once one has.

    A request whose grammar is being compiled waits here, beside the queue; others of its class may pass it.
    """

    def __init__(self, table: SequenceTable, vocab_size: int, load: Callable[[], Compiler]) -> None:
        self._table = table
        self._library = Library(load)
        self._masks: Masks | None = None  # once there is a grammar
        self._threads: xgrammar.BatchGrammarMatcher | None = None
        self._scratch: Int32 = np.zeros((0, -(-vocab_size // 32)), np.int32)  # [n, W], for as many as were ever filled
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
            import xgrammar  # it is there since a grammar has been compiled

            self._threads = xgrammar.BatchGrammarMatcher()
        return self._threads

    def masks(self, slots: Int32) -> StepMasks:
        """The tokens that may come next: all tokens so far are known of these sequences."""
        if not len(slots):
            return NO_MASKS
        masks = [self._of(slot).mask for slot in slots.tolist()]
        found = {id(mask): mask for mask in masks}
        number = {one: i for i, one in enumerate(found)}
        return StepMasks(
            np.stack([mask.words for mask in found.values()]), np.array([number[id(mask)] for mask in masks], np.int32)
        )

    def _of(self, slot: int) -> Follower:
        return self._table.followers.get(slot) or self._begin(slot)

    def _begin(self, slot: int) -> Follower:
        """The sequence draws its first token, or goes on after it has lost its slot."""
        table = self._table
        request = table.requests[slot]
        assert request is not None
        assert request.guide is not None
        follower = request.resting.pop(int(table.sample[slot]), None)
        if follower is None:
            if self._masks is None:
                self._masks = Masks(request.guide.begin)
            follower = Follower(request.guide, self._masks.of(request.guide.first))
        table.followers[slot] = follower
        return follower

    def follow(self, slots: Int64, token: Int32) -> Followed:
        """Each of the sequences has got a token. In its stead one that cannot come is told of as stuck."""
        table = self._table
        followers = [table.followers[slot] for slot in slots.tolist()]
        runs: list[list[int]] = [[] for _ in followers]
        stuck = np.zeros(len(slots), np.bool_)
        given = [i for i, one in enumerate(followers) if one.given]
        drawn = [i for i, one in enumerate(followers) if not one.given]
        for i in given:
            stuck[i] = followers[i].given.pop() != token[i]
        self._give(followers[i] for i in given)
        if drawn:
            taken = self._batch.batch_accept_token([followers[i].matcher for i in drawn], token[drawn].tolist())
            stuck[drawn] = ~np.array(taken, np.bool_)
            room = (table.limit[slots] - table.known[slots]).tolist()
            for i in self._run_on(followers, runs, room, [i for i in drawn if not stuck[i]]):
                stuck[i] = True
        return Followed(runs, stuck)

    def _run_on(
        self, followers: Sequence[Follower], runs: list[list[int]], room: Sequence[int], going: Sequence[int]
    ) -> list[int]:
        """Follows those `going` to where they have a choice, and adds what comes until then to their `runs`.

        Returns who ends up with nothing that may come.
        """
        stuck = []
        while going:
            self._fill([followers[i] for i in going])
            further = []
            for i in going:
                one, run = followers[i], runs[i]
                more = one.settled() if len(run) < min(room[i], MOST) else []
                run += more
                if one.over:
                    continue
                if more:
                    further.append(i)
                elif one.mask.none:
                    stuck.append(i)
                elif len(run) < min(room[i], SKIP):
                    one.given, runs[i] = run[::-1], []
            going = further
        self._give(one for one in followers if one.given)
        return stuck

    def _fill(self, followers: Sequence[Follower]) -> None:
        """Finds the masks of the followers, from where they are."""
        assert self._masks is not None
        count = len(followers)
        if count > len(self._scratch):
            self._scratch = np.zeros((2 * count, self._masks.words), np.int32)
        words_nW = self._scratch[:count]
        words_nW.fill(0)
        self._batch.batch_fill_next_token_bitmask([one.matcher for one in followers], words_nW)
        masks = self._masks.of_many(words_nW, [one.free for one in followers])
        for one, mask in zip(followers, masks, strict=True):
            one.free = one.mask = mask

    def _give(self, followers: Iterable[Follower]) -> None:
        """The next of the tokens that they are given is all that they may draw."""
        assert self._masks is not None
        for one in followers:
            one.mask = self._masks.single(one.given[-1]) if one.given else one.free
