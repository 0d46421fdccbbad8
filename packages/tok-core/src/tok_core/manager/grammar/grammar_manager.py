"""Follow the grammar of each guided sequence and provide the mask of tokens allowed next.

Each worker compiles one grammar and follows its sequences. This module sends tokens to the workers and receives masks.
Only the sequences that a worker follows wait for it.

Legend: W words of a packed set of tokens, n sequences, m distinct masks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.errors import EngineError
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
from tok_core.manager.grammar.grammar_state import GrammarState, GrammarWorker, GrammarWorkers, MatcherState
from tok_core.manager.requests import Request
from tok_core.manager.sequences import SequenceTable
from tok_core.messages import EMPTY, Int32, Int64
from tok_core.sampling_params import Grammar

Bools = NDArray[np.bool_]
LOOK: Final = 2e-3  # seconds between looks at grammars that are being compiled by threads
MAX_WORKERS: Final = 128  # grammars that are compiled or followed at once
MAX_IDLE: Final = 32  # grammars without requests, among these, that are kept for later requests
MAX_COMPILING: Final = 4  # grammars that are compiled at once
PATIENCE: Final = 60.0  # seconds that a worker has for an answer, since the CPU may be busy with other work
TOO_MUCH: Final = "grammars whose texts take less time and memory to follow: fewer alternatives that begin alike"


class StepMasks(NamedTuple):
    """Masks of a step's guided rows: each distinct one once, packed, int32 [m, W], and each row's index, int32 [n]."""

    words: Int32
    which: Int32


NO_MASKS = StepMasks(EMPTY.reshape(0, 0), EMPTY)


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

    A request whose grammar is being compiled waits here and not in the queue; others of its class may overtake it. The
    next grammar to compile is one of the caller with the fewest grammars being compiled.
    """

    def __init__(
        self,
        table: SequenceTable,
        workers: GrammarWorkers,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._workers = workers
        self._clock = clock
        self._masks: MaskCache | None = None  # set when the first grammar has been compiled
        self._grammar_states: dict[Grammar, GrammarState] = {}  # in order of last use
        self._count = 0
        self._advanced: list[tuple[MatcherState, list[int], bool]] = []
        self._touched: dict[Grammar, GrammarState] = {}  # grammars with work to be sent
        self.waiting: dict[int, Request] = {}
        self.failed: list[tuple[int, str]] = []  # requests to report that cannot be guided any more, and why
        self.refused: list[tuple[int, str]] = []  # those whose grammar takes too much, and what is allowed instead

    def admit(self, request: Request) -> bool:
        """Return whether the request may join the queue; if not, it waits here for its grammar."""
        grammar = request.params.grammar
        if grammar is None:
            return True
        grammar_state = self._grammar_states.pop(grammar, None) or GrammarState(grammar, request.tenant)
        self._grammar_states[grammar] = grammar_state
        grammar_state.requests[request.rid] = request
        request.grammar_state = grammar_state
        if grammar_state.first is None:
            self.waiting[request.rid] = request
            self._begin_some()
        return grammar_state.first is not None

    def admitted(self) -> list[Request]:
        """Remove and return the requests that have waited here and may join the queue now, in order of arrival."""
        if not self.waiting:
            return []
        found = [
            one
            for one in self.waiting.values()
            if one.grammar_state is not None and one.grammar_state.first is not None
        ]
        for request in found:
            del self.waiting[request.rid]
        return found

    def leave(self, request: Request) -> None:
        """Release the grammar state that only this request, which has ended, needed."""
        grammar_state = request.grammar_state
        if grammar_state is None:
            return
        self.waiting.pop(request.rid, None)
        grammar_state.requests.pop(request.rid, None)
        for matcher in request.parked_matchers.values():
            self.end(matcher)
        if not grammar_state.requests and grammar_state.first is None:
            self._drop(grammar_state)
        self._begin_some()

    def end(self, matcher: MatcherState) -> None:
        """Drop the matcher state of a sequence that has ended, and queue the notice to its worker."""
        grammar_state = matcher.grammar_state
        if grammar_state.matchers.pop(matcher.number, None) is None:
            return
        matcher.slot = -1
        grammar_state.waiting.discard(matcher.number)
        if matcher.tokens:
            grammar_state.work.ended.append(matcher.number)
            if len(grammar_state.work.ended) >= 64:
                self._touched[grammar_state.grammar] = grammar_state

    @property
    def patience(self) -> float:
        """Return the seconds after which to poll the workers, even if nothing wakes the manager's loop."""
        return 1.0 if self._workers.wakes or not self.waiting else LOOK

    def close(self) -> None:
        """Stop the workers."""
        for grammar_state in list(self._grammar_states.values()):
            self._drop(grammar_state)
        self._workers.close()

    def masks(self, slots: Int32) -> StepMasks:
        """Return the masks of the tokens that may come next. All tokens so far of these sequences must be known."""
        if not len(slots):
            return NO_MASKS
        masks = [self._matcher_of(slot).mask for slot in slots.tolist()]
        found = {id(mask): mask for mask in masks}
        number = {one: i for i, one in enumerate(found)}
        return StepMasks(
            np.stack([mask.words for mask in found.values()]), np.array([number[id(mask)] for mask in masks], np.int32)
        )

    def follow(self, slots: Int64, token: Int32) -> None:
        """Send each sequence's new token to its worker. `advance` returns what comes next, once the worker replies."""
        table = self._table
        room = (table.limit[slots] - table.known[slots]).tolist()
        for slot, one, left in zip(slots.tolist(), token.tolist(), room, strict=True):
            try:
                self._follow(slot, one, left)
            except Exception as error:
                self.failed.append((int(table.rid[slot]), _reason(error)))
        self._send()

    def advance(self) -> Advance | None:
        """Return what comes next in the sequences followed since the last call; None if there are none."""
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
        grammar_state = matcher.grammar_state
        if not grammar_state.waiting:
            grammar_state.since = self._clock()
        matcher.tokens.append(token)
        matcher.room = room
        grammar_state.work.follow.append(FollowRequest(matcher.number, [token], room))
        grammar_state.waiting.add(matcher.number)
        self._touched[grammar_state.grammar] = grammar_state

    def _matcher_of(self, slot: int) -> MatcherState:
        return self._table.matchers.get(slot) or self._begin(slot)

    def _begin(self, slot: int) -> MatcherState:
        """Return the matcher state of a sequence that samples its first token, or that has a slot again."""
        table = self._table
        request = table.requests[slot]
        assert request is not None
        grammar_state = request.grammar_state
        assert grammar_state is not None
        assert grammar_state.first is not None
        matcher = request.parked_matchers.pop(int(table.sample[slot]), None)
        if matcher is None:
            self._count += 1
            matcher = grammar_state.matchers[self._count] = MatcherState(
                grammar_state, self._count, grammar_state.first
            )
        table.matchers[slot] = matcher
        return matcher

    def _set_mask(self, matcher: MatcherState) -> None:
        """Set the mask: the next forced token alone, if one is left, else the mask after the forced tokens."""
        assert self._masks is not None
        matcher.mask = self._masks.single(matcher.given[-1]) if matcher.given else matcher.free

    def _begin_some(self) -> None:
        """Start compiling grammars that requests wait for, as many as may be compiled at once."""
        if not self.waiting:
            return
        compiling = Counter(
            grammar_state.tenant
            for grammar_state in self._grammar_states.values()
            if grammar_state.worker and not grammar_state.ready
        )
        wanted = [
            grammar_state
            for grammar_state in self._grammar_states.values()
            if grammar_state.worker is None and grammar_state.requests
        ]
        while wanted and compiling.total() < MAX_COMPILING and self._make_room():
            grammar_state = min(wanted, key=lambda one: compiling[one.tenant])
            wanted.remove(grammar_state)
            compiling[grammar_state.tenant] += 1
            self._start(grammar_state)

    def _make_room(self) -> bool:
        """Return whether one more worker may start; stop workers without requests beyond the limits."""
        workers = [grammar_state for grammar_state in self._grammar_states.values() if grammar_state.worker is not None]
        idle = [grammar_state for grammar_state in workers if not grammar_state.requests]
        for grammar_state in idle[: max(len(idle) - MAX_IDLE, len(workers) + 1 - MAX_WORKERS, 0)]:
            self._drop(grammar_state)
            workers.remove(grammar_state)
        return len(workers) < MAX_WORKERS

    def _start(self, grammar_state: GrammarState) -> None:
        grammar_state.since = self._clock()
        try:
            grammar_state.worker = self._workers.begin(grammar_state.grammar)
        except Exception as error:
            named = str(error) if isinstance(error, EngineError | OSError) else f"{type(error).__name__}: {error}"
            self._fail(grammar_state, list(grammar_state.requests), f"the grammar cannot be compiled: {named}")

    def _drop(self, grammar_state: GrammarState) -> None:
        if self._grammar_states.get(grammar_state.grammar) is grammar_state:
            del self._grammar_states[grammar_state.grammar]
        grammar_state.ready = False
        self._close(grammar_state)

    @staticmethod
    def _close(grammar_state: GrammarState) -> None:
        """Stop the grammar's worker, if it has one. If that fails, it is logged, but no request fails."""
        worker, grammar_state.worker = grammar_state.worker, None
        if worker is not None:
            try:
                worker.close()
            except Exception:
                log.exception("a worker of a grammar cannot be closed")

    def _send(self) -> None:
        """Send all queued work, in one message to each worker."""
        touched, self._touched = self._touched, {}
        for grammar_state in touched.values():
            if grammar_state.worker is not None and grammar_state.ready:
                work, grammar_state.work = grammar_state.work, MatcherCall([], [])
                try:
                    grammar_state.worker.send(work)
                except Exception as error:
                    self._fail(grammar_state, list(grammar_state.requests), _reason(error))

    def _receive_all(self) -> None:
        """Process the messages of all workers."""
        now = self._clock()
        for grammar_state in list(self._grammar_states.values()):
            if grammar_state.worker is None:
                continue
            try:
                self._receive(grammar_state, grammar_state.worker, now)
            except Exception as error:  # it must not end other grammars' requests
                self._fail(grammar_state, list(grammar_state.requests), _reason(error))
        self._send()

    def _receive(self, grammar_state: GrammarState, worker: GrammarWorker, now: float) -> None:
        try:
            messages = worker.receive()
        except WorkerLost as lost:
            self._handle_loss(grammar_state, lost.sequence)
            return
        for message in messages:
            grammar_state.since = now
            if isinstance(message, Verdict):
                self._handle_verdict(grammar_state, message)
            else:
                self._take(grammar_state, message)
        late = now - grammar_state.since > PATIENCE and (grammar_state.waiting or not grammar_state.ready)
        if late and grammar_state.worker is not None:
            self._handle_loss(grammar_state, worker.at)

    def _handle_verdict(self, grammar_state: GrammarState, verdict: Verdict) -> None:
        """Process the verdict on a grammar: compiled, refused or failed."""
        if verdict.allowed or verdict.failed:
            for rid in grammar_state.requests:
                one = self.refused if verdict.allowed else self.failed
                one.append((rid, verdict.allowed or verdict.failed))
            self._drop(grammar_state)
            return
        begin = np.frombuffer(verdict.begin, np.int16)
        if len(begin) != self._vocab_size:
            raise ValueError(f"the worker sent a mask of {len(begin)} tokens; the vocabulary has {self._vocab_size}")
        masks = self._masks or MaskCache(begin)
        grammar_state.first, grammar_state.ready = masks.of(np.frombuffer(verdict.first, np.int32)), True
        self._masks = masks
        if grammar_state.matchers:  # sequences of a worker that was lost: the new one replays them
            grammar_state.work = MatcherCall(
                [self._replay(one) for one in grammar_state.matchers.values() if one.tokens], []
            )
            self._touched[grammar_state.grammar] = grammar_state
        self._begin_some()

    @staticmethod
    def _replay(matcher: MatcherState) -> FollowRequest:
        waits = matcher.number in matcher.grammar_state.waiting
        return FollowRequest(matcher.number, matcher.tokens, matcher.room if waits else REPLAY)

    def _take(self, grammar_state: GrammarState, answer: MatcherReply) -> None:
        """Process a worker's reply about the sequences it has followed."""
        if self._masks is None or not grammar_state.ready:
            raise ValueError("the worker replied about sequences before its verdict on the grammar")
        grammar_state.losses = 0
        for number, words in enumerate(answer.masks, answer.first):
            grammar_state.known[number] = self._masks.of(np.frombuffer(words, np.int32))
            grammar_state.known.pop(number - MAX_KNOWN_MASKS, None)
        for one in answer.followed:
            matcher = grammar_state.matchers.get(one.sequence)
            if matcher is None:
                continue
            if one.refused or one.failed:
                self._refuse(grammar_state, one)
                continue
            if one.sequence not in grammar_state.waiting:
                continue
            try:
                self._apply_reply(grammar_state, matcher, one)
            except Exception as error:
                self._refuse(grammar_state, FollowResult(one.sequence, failed=_reason(error)))

    def _apply_reply(self, grammar_state: GrammarState, matcher: MatcherState, one: FollowResult) -> None:
        """Apply the reply about one sequence. If it is invalid, raises before anything has changed."""
        if one.run or one.given:
            tokens = one.run + one.given
            if min(tokens) < 0 or max(tokens) >= self._vocab_size:
                raise ValueError(f"the worker sent tokens beyond the vocabulary of {self._vocab_size}")
        free = grammar_state.known[one.mask] if one.mask >= 0 else None
        grammar_state.waiting.discard(one.sequence)
        matcher.tokens += one.run
        matcher.tokens += one.given[::-1]
        matcher.given = one.given
        if free is not None:
            matcher.free = free
            self._set_mask(matcher)
        self._advanced.append((matcher, one.run, one.stuck))

    def _refuse(self, grammar_state: GrammarState, one: FollowResult) -> None:
        """Refuse or fail the request of a sequence."""
        rids = [rid for rid, request in grammar_state.requests.items() if self._has(request, one.sequence)]
        self.refused += [(rid, one.refused) for rid in rids if one.refused]
        self.failed += [(rid, one.failed) for rid in rids if not one.refused]

    def _has(self, request: Request, number: int) -> bool:
        matchers = [self._table.matchers.get(slot) for slot in request.slots.values()]
        return any(one is not None and one.number == number for one in (*matchers, *request.parked_matchers.values()))

    def _handle_loss(self, grammar_state: GrammarState, sequence: int) -> None:
        """Handle a worker that has ended while it was at `sequence`; start another for the remaining sequences."""
        self._close(grammar_state)
        grammar_state.ready = False
        grammar_state.known.clear()
        grammar_state.work = MatcherCall([], [])
        grammar_state.losses += 1
        blameless = sequence in (COMPILING, IDLE) or sequence not in grammar_state.matchers
        if not grammar_state.requests:
            self._drop(grammar_state)
            return
        if self._workers.lost_all() and grammar_state.losses < 3:
            pass
        elif (sequence == COMPILING and grammar_state.first is None) or (blameless and grammar_state.losses >= 3):
            self.refused += [(rid, TOO_MUCH) for rid in grammar_state.requests]
            self._drop(grammar_state)
            return
        elif not blameless:
            self._refuse(grammar_state, FollowResult(sequence, refused=TOO_MUCH))
            self.end(grammar_state.matchers[sequence])
        self._start(grammar_state)

    def _fail(self, grammar_state: GrammarState, rids: list[int], reason: str) -> None:
        self.failed += [(rid, reason) for rid in rids]
        self._drop(grammar_state)


log = logging.getLogger("tok_core")


def _reason(error: Exception) -> str:
    log.error("a grammar cannot be followed", exc_info=error)
    return f"the grammar cannot be followed: {type(error).__name__}: {error}"
