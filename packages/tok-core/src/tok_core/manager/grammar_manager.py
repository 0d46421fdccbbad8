"""Follow the grammar of each guided sequence and provide the masks of tokens allowed next.

Each worker compiles one grammar and follows its sequences (`GrammarPool`). The manager of grammars sends tokens to the
workers and receives masks. Only the sequences that a worker follows wait for it.

Legend: W words of a packed set of tokens, n sequences, m distinct masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.grammar import (
    COMPILING,
    IDLE,
    MAX_KNOWN_MASKS,
    REPLAY,
    FollowRequest,
    FollowResult,
    MaskCache,
    MatcherCall,
    MatcherReply,
    Verdict,
    WorkerLost,
)
from tok_core.manager.faults import Faults
from tok_core.manager.grammar_workers import (
    GrammarPool,
    GrammarState,
    GrammarWorker,
    GrammarWorkers,
    MatcherState,
    failure_of,
)
from tok_core.manager.requests import Request
from tok_core.manager.sequences import SequenceTable
from tok_core.manager.token_restrictions import NO_MASKS, AllowedTokens, StepMasks
from tok_core.messages import Int32, Int64

Bools = NDArray[np.bool_]
COMPILE_POLL_SECONDS: Final = 2e-3  # seconds between looks at grammars that are being compiled by threads
PATIENCE: Final = 60.0  # seconds that a worker has for an answer, since the CPU may be busy with other work
MAX_LOSSES: Final = 3  # workers lost in a row, without a sequence to blame, after which a grammar is refused
MAX_ENDED: Final = 64  # ended sequences of a grammar after which its worker is notified
TOO_MUCH: Final = "grammars whose texts take less time and memory to follow: fewer alternatives that begin alike"


class Advance(NamedTuple):
    """Continuation of n guided sequences.

    slots  int64 [n], their slots
    runs   forced tokens of each, appended without being sampled; often none
    stuck  bool [n]: whether no token may follow these, since this vocabulary cannot continue the grammar
    """

    slots: Int64
    runs: list[list[int]]
    stuck: Bools


class GrammarManager:
    """Guided decoding of the sequences in `table` whose requests have a grammar.

    A request whose grammar is being compiled waits here and not in the queue; others of its class may overtake it.

    draft  returns tokens that may follow each slot's last known one, and their probabilities; None: nothing is drafted
    """

    def __init__(
        self,
        table: SequenceTable,
        workers: GrammarWorkers,
        vocab_size: int,
        faults: Faults,
        clock: Callable[[], float],
    ) -> None:
        self.pool = GrammarPool(workers, faults, clock)
        self.waiting: dict[int, Request] = {}
        self._allowed = AllowedTokens(vocab_size)
        self._table = table
        self._vocab_size = vocab_size
        self._faults = faults
        self._clock = clock
        self._masks: MaskCache | None = None  # set when the first grammar has been compiled
        self._count = 0
        self._advanced: list[tuple[MatcherState, list[int], bool]] = []
        self._followed: list[MatcherState] = []  # with tokens that have not been sent to their workers
        self.draft: Callable[[Int64], list[tuple[list[int], list[float]]]] | None = None

    def admit(self, request: Request) -> bool:
        """Return whether the request may join the queue; if not, it waits here for its grammar."""
        self._allowed.acquire(request)
        grammar = request.params.grammar
        if grammar is None:
            return True
        state = request.grammar_state = self.pool.use(request, grammar)
        if state.first is None:
            self.waiting[request.rid] = request
            self.pool.compile_some()
        return state.first is not None

    def admitted(self) -> list[Request]:
        """Remove and return the requests that have waited here and may join the queue now, in order of arrival."""
        states = ((one, one.grammar_state) for one in self.waiting.values())
        found = [one for one, state in states if state is not None and state.first is not None]
        for request in found:
            del self.waiting[request.rid]
        return found

    def leave(self, request: Request) -> None:
        """Release the grammar state, and the allowed tokens, that only this request, which has ended, needed."""
        self._allowed.release(request)
        state = request.grammar_state
        if state is None:
            return
        self.waiting.pop(request.rid, None)
        state.requests.pop(request.rid, None)
        for matcher in request.parked_matchers.values():
            self.end(matcher)
        if not state.requests and state.first is None:
            self.pool.drop(state)
        self._compile_waiting()

    def end(self, matcher: MatcherState) -> None:
        """Drop the matcher state of a sequence that has ended, and queue the notice to its worker."""
        state = matcher.grammar_state
        if state.matchers.pop(matcher.number, None) is None:
            return
        matcher.slot = -1
        state.waiting.discard(matcher.number)
        if matcher.unsent is not None and matcher.unsent[0] is state.work:
            state.work.follow = [one for one in state.work.follow if one is not matcher.unsent[1]]
        if matcher.tokens:
            state.work.ended.append(matcher.number)
            if len(state.work.ended) >= MAX_ENDED:
                self.pool.touch(state)

    @property
    def patience(self) -> float:
        """Return the seconds after which to poll the workers, even if nothing wakes the manager's loop."""
        return 1.0 if self.pool.workers.wakes or not self.waiting else COMPILE_POLL_SECONDS

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()

    def masks(self, slots: Int32) -> StepMasks:
        """Return the masks of the tokens that may come next: of guided sequences, and of those with allowed tokens.

        All tokens so far of the guided sequences must be known.
        """
        if not len(slots):
            return NO_MASKS
        guided = self._table.guided[slots]
        if guided.all():
            return self._grammar_masks(slots)
        sets, set_index = np.unique(self._table.allowed_set[slots[~guided]], return_inverse=True)
        bitmask, mask_index = self._allowed.words(sets), np.empty(len(slots), np.int32)
        mask_index[~guided] = set_index
        if guided.any():
            grammar_masks = self._grammar_masks(slots[guided])
            mask_index[guided] = len(bitmask) + grammar_masks.mask_index
            bitmask = np.concatenate([bitmask, grammar_masks.bitmask])
        return StepMasks(bitmask, mask_index)

    def _grammar_masks(self, slots: Int32) -> StepMasks:
        ahead, matchers = self._table.draft_masks, self._table.matchers
        masks = [ahead.get(slot) or (matchers.get(slot) or self._begin(slot)).mask for slot in slots.tolist()]
        distinct = {id(mask): mask for mask in masks}
        index_of = {key: index for index, key in enumerate(distinct)}
        return StepMasks(
            bitmask=np.stack([mask.words for mask in distinct.values()]),
            mask_index=np.array([index_of[id(mask)] for mask in masks], np.int32),
        )

    def follow(self, slots: Int64, token: Int32) -> None:
        """Note each sequence's new token. `advance` sends it to its worker, and returns what the worker replies.

        A sequence may get several tokens before: accepted drafts.
        """
        table = self._table
        room = (table.limit[slots] - table.known[slots]).tolist()
        for slot, one, left in zip(slots.tolist(), token.tolist(), room, strict=True):
            try:
                self._follow(slot, one, left)
            except Exception as error:
                self._faults.fail(int(table.rid[slot]), failure_of(error))

    def advance(self) -> Advance | None:
        """Return what comes next in the sequences followed since the last call; None if there are none."""
        self._send_followed()
        self._receive_all()
        if not self._advanced:
            return None
        advanced, self._advanced = [one for one in self._advanced if one[0].slot >= 0], []
        slots = np.array([matcher.slot for matcher, _, _ in advanced], np.int64)
        for matcher, _, _ in advanced:
            matcher.slot = -1
        stuck = np.array([stuck for _, _, stuck in advanced], np.bool_)
        return Advance(slots, [run for _, run, _ in advanced], stuck)

    def _follow(self, slot: int, token: int, room: int) -> None:
        matcher = self._table.matchers[slot]
        matcher.slot = slot
        if matcher.given:
            stuck = matcher.given.pop() != token
            self._set_mask(matcher)
            self._advanced.append((matcher, [], stuck))
            return
        state = matcher.grammar_state
        if matcher.request is not None:
            room = 0  # no forced tokens, since the request may ban them: only a mask
        if not state.waiting:
            state.since = self._clock()
        matcher.tokens.append(token)
        matcher.room = room
        matcher.ahead = []
        if matcher.unsent is not None and matcher.unsent[0] is state.work:
            request = matcher.unsent[1]
            request.tokens.append(token)
            request.room = room
            return
        matcher.unsent = state.work, FollowRequest(matcher.number, [token], room)
        state.work.follow.append(matcher.unsent[1])
        state.waiting.add(matcher.number)
        self.pool.touch(state)
        self._followed.append(matcher)

    def _send_followed(self) -> None:
        """Send the noted tokens, with drafts of what may follow them."""
        followed, self._followed = [one for one in self._followed if one.slot >= 0], []
        if self.draft is not None:
            drafted = [one for one in followed if one.request is None and one.unsent is not None]
            drafts = self.draft(np.array([one.slot for one in drafted], np.int64))
            for matcher, draft in zip(drafted, drafts, strict=True):
                assert matcher.unsent is not None
                matcher.draft = draft
                matcher.unsent[1].draft = draft[0]
        self.pool.send()

    def _begin(self, slot: int) -> MatcherState:
        """Return the matcher state of a sequence that samples its first token, or that has a slot again."""
        table = self._table
        request = table.requests[slot]
        assert request is not None
        state = request.grammar_state
        assert state is not None
        assert state.first is not None
        matcher = request.parked_matchers.pop(int(table.sample[slot]), None)
        if matcher is None:
            self._count += 1
            restricted = request.allowed_set >= 0 or request.banned
            matcher = MatcherState(state, self._count, state.first, request if restricted else None)
            state.matchers[self._count] = matcher
            self._set_mask(matcher)
            if matcher.mask.none:
                self._faults.refuse(request.rid, "grammars that tokens can begin that the request does not rule out")
        table.matchers[slot] = matcher
        return matcher

    def _set_mask(self, matcher: MatcherState) -> None:
        """Set the mask: the next forced token alone, if one is left, else the mask after the forced tokens.

        The tokens that the sequence's request rules out are taken from the mask.
        """
        assert self._masks is not None
        matcher.mask = self._masks.single(matcher.given[-1]) if matcher.given else matcher.free
        if matcher.request is not None:
            matcher.mask = self._masks.of(self._allowed.restrict(matcher.request, matcher.mask.words, matcher.tokens))

    def _compile_waiting(self) -> None:
        if self.waiting:
            self.pool.compile_some()

    def _receive_all(self) -> None:
        """Process the messages of all workers."""
        now = self._clock()
        for state in list(self.pool.states.values()):
            if state.worker is None:
                continue
            try:
                self._receive(state, state.worker, now)
            except Exception as error:  # it must not end other grammars' requests
                self.pool.fail(state, error)
        self.pool.send()

    def _receive(self, state: GrammarState, worker: GrammarWorker, now: float) -> None:
        try:
            messages = worker.receive()
        except WorkerLost as lost:
            self._handle_loss(state, lost.sequence, orphaned=lost.orphaned)
            return
        for message in messages:
            state.since = now
            if isinstance(message, Verdict):
                self._handle_verdict(state, message)
            else:
                self._take(state, message)
        late = now - state.since > PATIENCE and (state.waiting or not state.ready)
        if late and state.worker is not None:
            self._handle_loss(state, worker.at, orphaned=False)

    def _handle_verdict(self, state: GrammarState, verdict: Verdict) -> None:
        """Process the verdict on a grammar: compiled, refused or failed."""
        if verdict.allowed or verdict.failed:
            for rid in state.requests:
                self._fail(rid, verdict.allowed, verdict.failed)
            self.pool.drop(state)
            return
        begin = np.frombuffer(verdict.begin, np.int16)
        if len(begin) != self._vocab_size:
            raise ValueError(f"the worker sent a mask of {len(begin)} tokens; the vocabulary has {self._vocab_size}")
        masks = self._masks or MaskCache(begin)
        state.first, state.ready = masks.of(np.frombuffer(verdict.first, np.int32)), True
        self._masks = masks
        if state.matchers:  # sequences of a worker that was lost: the new one replays them
            state.work = MatcherCall([_replay(one) for one in state.matchers.values() if one.tokens], [])
            self.pool.touch(state)
        self._compile_waiting()

    def _take(self, state: GrammarState, answer: MatcherReply) -> None:
        """Process a worker's reply about the sequences it has followed."""
        if self._masks is None or not state.ready:
            raise ValueError("the worker replied about sequences before its verdict on the grammar")
        state.losses = 0
        for number, words in enumerate(answer.masks, answer.first):
            state.known[number] = self._masks.of(np.frombuffer(words, np.int32))
        for one in answer.followed:
            matcher = state.matchers.get(one.sequence)
            if matcher is None:
                continue
            if one.refused or one.failed:
                self._fail_sequence(matcher, one.refused, one.failed)
            elif one.sequence in state.waiting:
                try:
                    self._apply_reply(matcher, one)
                except Exception as error:
                    self._fail_sequence(matcher, "", failure_of(error))
        for number in range(answer.first - MAX_KNOWN_MASKS, answer.first + len(answer.masks) - MAX_KNOWN_MASKS):
            state.known.pop(number, None)

    def _apply_reply(self, matcher: MatcherState, one: FollowResult) -> None:
        """Apply the reply about one sequence. If it is invalid, raises before anything has changed."""
        state = matcher.grammar_state
        if one.run or one.given:
            tokens = one.run + one.given
            if min(tokens) < 0 or max(tokens) >= self._vocab_size:
                raise ValueError(f"the worker sent tokens beyond the vocabulary of {self._vocab_size}")
        free = state.known[one.mask] if one.mask >= 0 else None
        matcher.ahead = [state.known[number] for number in one.drafted]
        state.waiting.discard(one.sequence)
        matcher.tokens += one.run
        matcher.tokens += one.given[::-1]
        matcher.given = one.given
        if free is not None:
            matcher.free = free
            self._set_mask(matcher)
        self._advanced.append((matcher, one.run, one.stuck or (matcher.request is not None and matcher.mask.none)))

    def _fail(self, rid: int, refused: str, failed: str) -> None:
        """Refuse the request, naming what is allowed instead, or fail it for a reason."""
        if refused:
            self._faults.refuse(rid, refused)
        else:
            self._faults.fail(rid, failed)

    def _fail_sequence(self, matcher: MatcherState, refused: str, failed: str) -> None:
        """Refuse or fail the request of a sequence."""
        for rid, request in matcher.grammar_state.requests.items():
            own = [self._table.matchers.get(slot) for slot in request.slots.values()]
            if matcher in own or matcher in request.parked_matchers.values():
                self._fail(rid, refused, failed)

    def _handle_loss(self, state: GrammarState, sequence: int, *, orphaned: bool) -> None:
        """Handle a worker that has ended while it was at `sequence`; start another for the remaining sequences.

        orphaned  as in `WorkerLost`: neither its grammar nor its sequence is to blame
        """
        self.pool.stop(state)
        state.known.clear()
        state.work = MatcherCall([], [])
        state.losses += 1
        if not state.requests:
            self.pool.drop(state)
            return
        guilty = None if sequence in (COMPILING, IDLE) else state.matchers.get(sequence)
        too_many = state.losses >= MAX_LOSSES
        if too_many or not orphaned:
            if (sequence == COMPILING and state.first is None) or (guilty is None and too_many):
                for rid in state.requests:
                    self._faults.refuse(rid, TOO_MUCH)
                self.pool.drop(state)
                return
            if guilty is not None:
                self._fail_sequence(guilty, TOO_MUCH, "")
                self.end(guilty)
        self.pool.start(state)


def _replay(matcher: MatcherState) -> FollowRequest:
    waits = matcher.number in matcher.grammar_state.waiting
    return FollowRequest(matcher.number, matcher.tokens, matcher.room if waits else REPLAY)
