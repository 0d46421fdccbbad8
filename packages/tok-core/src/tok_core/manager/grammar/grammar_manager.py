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
    Follow,
    Followed,
    MaskCache,
    MatcherCall,
    MatcherReply,
    Verdict,
    WorkerLost,
)
from tok_core.manager.grammar.grammar_state import GrammarState, GrammarWorker, GrammarWorkers, MatcherState
from tok_core.manager.sequences import Request, SequenceTable
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
        self._guides: dict[Grammar, GrammarState] = {}  # in order of last use
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
        guide = self._guides.pop(grammar, None) or GrammarState(grammar, request.tenant)
        self._guides[grammar] = guide
        guide.requests[request.rid] = request
        request.guide = guide
        if guide.first is None:
            self.waiting[request.rid] = request
            self._begin_some()
        return guide.first is not None

    def admitted(self) -> list[Request]:
        """Remove and return the requests that have waited here and may join the queue now, in order of arrival."""
        if not self.waiting:
            return []
        found = [one for one in self.waiting.values() if one.guide is not None and one.guide.first is not None]
        for request in found:
            del self.waiting[request.rid]
        return found

    def leave(self, request: Request) -> None:
        """Release the grammar state that only this request, which has ended, needed."""
        guide = request.guide
        if guide is None:
            return
        self.waiting.pop(request.rid, None)
        guide.requests.pop(request.rid, None)
        for follower in request.resting.values():
            self.end(follower)
        if not guide.requests and guide.first is None:
            self._drop(guide)
        self._begin_some()

    def end(self, follower: MatcherState) -> None:
        """Drop the matcher state of a sequence that has ended, and queue the notice to its worker."""
        guide = follower.guide
        if guide.followers.pop(follower.number, None) is None:
            return
        follower.slot = -1
        guide.waiting.discard(follower.number)
        if follower.tokens:
            guide.work.ended.append(follower.number)
            if len(guide.work.ended) >= 64:
                self._touched[guide.grammar] = guide

    @property
    def patience(self) -> float:
        """Return the seconds after which to poll the workers, even if nothing wakes the manager's loop."""
        return 1.0 if self._workers.wakes or not self.waiting else LOOK

    def close(self) -> None:
        """Stop the workers."""
        for guide in list(self._guides.values()):
            self._drop(guide)
        self._workers.close()

    def masks(self, slots: Int32) -> StepMasks:
        """Return the masks of the tokens that may come next. All tokens so far of these sequences must be known."""
        if not len(slots):
            return NO_MASKS
        masks = [self._of(slot).mask for slot in slots.tolist()]
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
        self._listen()
        if not self._advanced:
            return None
        advanced, self._advanced = [one for one in self._advanced if one[0].slot >= 0], []
        slots = np.array([follower.slot for follower, _, _ in advanced], np.int64)
        for follower, _, _ in advanced:
            follower.slot = -1
        stuck = np.array([stuck for _, _, stuck in advanced], np.bool_)
        return Advance(slots, [run for _, run, _ in advanced], stuck)

    def _follow(self, slot: int, token: int, room: int) -> None:
        follower = self._table.followers[slot]
        follower.slot = slot
        if follower.given:
            stuck = follower.given.pop() != token
            self._give(follower)
            self._advanced.append((follower, [], stuck))
            return
        guide = follower.guide
        if not guide.waiting:
            guide.since = self._clock()
        follower.tokens.append(token)
        follower.room = room
        guide.work.follow.append(Follow(follower.number, [token], room))
        guide.waiting.add(follower.number)
        self._touched[guide.grammar] = guide

    def _of(self, slot: int) -> MatcherState:
        return self._table.followers.get(slot) or self._begin(slot)

    def _begin(self, slot: int) -> MatcherState:
        """Return the matcher state of a sequence that samples its first token, or that has a slot again."""
        table = self._table
        request = table.requests[slot]
        assert request is not None
        guide = request.guide
        assert guide is not None
        assert guide.first is not None
        follower = request.resting.pop(int(table.sample[slot]), None)
        if follower is None:
            self._count += 1
            follower = guide.followers[self._count] = MatcherState(guide, self._count, guide.first)
        table.followers[slot] = follower
        return follower

    def _give(self, follower: MatcherState) -> None:
        """Set the mask: the next forced token alone, if one is left, else the mask after the forced tokens."""
        assert self._masks is not None
        follower.mask = self._masks.single(follower.given[-1]) if follower.given else follower.free

    def _begin_some(self) -> None:
        """Start compiling grammars that requests wait for, as many as may be compiled at once."""
        if not self.waiting:
            return
        compiling = Counter(guide.tenant for guide in self._guides.values() if guide.worker and not guide.ready)
        wanted = [guide for guide in self._guides.values() if guide.worker is None and guide.requests]
        while wanted and compiling.total() < MAX_COMPILING and self._make_room():
            guide = min(wanted, key=lambda one: compiling[one.tenant])
            wanted.remove(guide)
            compiling[guide.tenant] += 1
            self._start(guide)

    def _make_room(self) -> bool:
        """Return whether one more worker may start; stop workers without requests beyond the limits."""
        workers = [guide for guide in self._guides.values() if guide.worker is not None]
        idle = [guide for guide in workers if not guide.requests]
        for guide in idle[: max(len(idle) - MAX_IDLE, len(workers) + 1 - MAX_WORKERS, 0)]:
            self._drop(guide)
            workers.remove(guide)
        return len(workers) < MAX_WORKERS

    def _start(self, guide: GrammarState) -> None:
        guide.since = self._clock()
        try:
            guide.worker = self._workers.begin(guide.grammar)
        except Exception as error:
            named = str(error) if isinstance(error, EngineError | OSError) else f"{type(error).__name__}: {error}"
            self._fail(guide, list(guide.requests), f"the grammar cannot be compiled: {named}")

    def _drop(self, guide: GrammarState) -> None:
        if self._guides.get(guide.grammar) is guide:
            del self._guides[guide.grammar]
        guide.ready = False
        self._close(guide)

    @staticmethod
    def _close(guide: GrammarState) -> None:
        """Stop the grammar's worker, if it has one. If that fails, it is logged, but no request fails."""
        worker, guide.worker = guide.worker, None
        if worker is not None:
            try:
                worker.close()
            except Exception:
                log.exception("a worker of a grammar cannot be closed")

    def _send(self) -> None:
        """Send all queued work, in one message to each worker."""
        touched, self._touched = self._touched, {}
        for guide in touched.values():
            if guide.worker is not None and guide.ready:
                work, guide.work = guide.work, MatcherCall([], [])
                try:
                    guide.worker.send(work)
                except Exception as error:
                    self._fail(guide, list(guide.requests), _reason(error))

    def _listen(self) -> None:
        """Process the messages of all workers."""
        now = self._clock()
        for guide in list(self._guides.values()):
            if guide.worker is None:
                continue
            try:
                self._hear(guide, guide.worker, now)
            except Exception as error:  # it must not end other grammars' requests
                self._fail(guide, list(guide.requests), _reason(error))
        self._send()

    def _hear(self, guide: GrammarState, worker: GrammarWorker, now: float) -> None:
        try:
            messages = worker.receive()
        except WorkerLost as lost:
            self._lose(guide, lost.sequence)
            return
        for message in messages:
            guide.since = now
            if isinstance(message, Verdict):
                self._judge(guide, message)
            else:
                self._take(guide, message)
        late = now - guide.since > PATIENCE and (guide.waiting or not guide.ready)
        if late and guide.worker is not None:
            self._lose(guide, worker.at)

    def _judge(self, guide: GrammarState, verdict: Verdict) -> None:
        """Process the verdict on a grammar: compiled, refused or failed."""
        if verdict.allowed or verdict.failed:
            for rid in guide.requests:
                one = self.refused if verdict.allowed else self.failed
                one.append((rid, verdict.allowed or verdict.failed))
            self._drop(guide)
            return
        begin = np.frombuffer(verdict.begin, np.int16)
        if len(begin) != self._vocab_size:
            raise ValueError(f"the worker tells of {len(begin)} tokens; the vocabulary has {self._vocab_size}")
        masks = self._masks or MaskCache(begin)
        guide.first, guide.ready = masks.of(np.frombuffer(verdict.first, np.int32)), True
        self._masks = masks
        if guide.followers:  # sequences of a worker that was lost: the new one replays them
            guide.work = MatcherCall([self._replay(one) for one in guide.followers.values() if one.tokens], [])
            self._touched[guide.grammar] = guide
        self._begin_some()

    @staticmethod
    def _replay(follower: MatcherState) -> Follow:
        waits = follower.number in follower.guide.waiting
        return Follow(follower.number, follower.tokens, follower.room if waits else REPLAY)

    def _take(self, guide: GrammarState, answer: MatcherReply) -> None:
        """Process a worker's reply about the sequences it has followed."""
        if self._masks is None or not guide.ready:
            raise ValueError("the worker answers before it has said whether the grammar can be followed")
        guide.losses = 0
        for number, words in enumerate(answer.masks, answer.first):
            guide.known[number] = self._masks.of(np.frombuffer(words, np.int32))
            guide.known.pop(number - MAX_KNOWN_MASKS, None)
        for one in answer.followed:
            follower = guide.followers.get(one.sequence)
            if follower is None:
                continue
            if one.refused or one.failed:
                self._refuse(guide, one)
                continue
            if one.sequence not in guide.waiting:
                continue
            try:
                self._go_on(guide, follower, one)
            except Exception as error:
                self._refuse(guide, Followed(one.sequence, failed=_reason(error)))

    def _go_on(self, guide: GrammarState, follower: MatcherState, one: Followed) -> None:
        """Apply the reply about one sequence. If it is invalid, raises before anything has changed."""
        if one.run or one.given:
            tokens = one.run + one.given
            if min(tokens) < 0 or max(tokens) >= self._vocab_size:
                raise ValueError(f"the worker tells of tokens that the vocabulary of {self._vocab_size} does not have")
        free = guide.known[one.mask] if one.mask >= 0 else None
        guide.waiting.discard(one.sequence)
        follower.tokens += one.run
        follower.tokens += one.given[::-1]
        follower.given = one.given
        if free is not None:
            follower.free = free
            self._give(follower)
        self._advanced.append((follower, one.run, one.stuck))

    def _refuse(self, guide: GrammarState, one: Followed) -> None:
        """Refuse or fail the request of a sequence."""
        rids = [rid for rid, request in guide.requests.items() if self._has(request, one.sequence)]
        self.refused += [(rid, one.refused) for rid in rids if one.refused]
        self.failed += [(rid, one.failed) for rid in rids if not one.refused]

    def _has(self, request: Request, number: int) -> bool:
        followers = [self._table.followers.get(slot) for slot in request.slots.values()]
        return any(one is not None and one.number == number for one in (*followers, *request.resting.values()))

    def _lose(self, guide: GrammarState, sequence: int) -> None:
        """Handle a worker that has ended while it was at `sequence`; start another for the remaining sequences."""
        self._close(guide)
        guide.ready = False
        guide.known.clear()
        guide.work = MatcherCall([], [])
        guide.losses += 1
        blameless = sequence in (COMPILING, IDLE) or sequence not in guide.followers
        if not guide.requests:
            self._drop(guide)
            return
        if self._workers.lost_all() and guide.losses < 3:
            pass
        elif (sequence == COMPILING and guide.first is None) or (blameless and guide.losses >= 3):
            self.refused += [(rid, TOO_MUCH) for rid in guide.requests]
            self._drop(guide)
            return
        elif not blameless:
            self._refuse(guide, Followed(sequence, refused=TOO_MUCH))
            self.end(guide.followers[sequence])
        self._start(guide)

    def _fail(self, guide: GrammarState, rids: list[int], reason: str) -> None:
        self.failed += [(rid, reason) for rid in rids]
        self._drop(guide)


log = logging.getLogger("tok_core")


def _reason(error: Exception) -> str:
    log.error("a grammar cannot be followed", exc_info=error)
    return f"the grammar cannot be followed: {type(error).__name__}: {error}"
