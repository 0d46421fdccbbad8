"""Keep the grammars of guided decoding, and the workers that compile and follow them, one worker a grammar."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from tok_core.errors import EngineError
from tok_core.grammar import FollowRequest, Mask, MatcherCall, MatcherReply, Verdict
from tok_core.manager.faults import Faults
from tok_core.sampling_params import Grammar

if TYPE_CHECKING:
    from tok_core.manager.requests import Request

MAX_WORKERS: Final = 128  # grammars that are compiled or followed at once
MAX_IDLE: Final = 32  # grammars without requests, among these, that are kept for later requests
MAX_COMPILING: Final = 4  # grammars that are compiled at once

log = logging.getLogger("tok_core")


class GrammarWorker(Protocol):
    """Worker of one grammar: a `WorkerProcess` of `tok_core.grammar.worker_processes`, or a `LocalWorker`."""

    @property
    def at(self) -> int: ...

    def send(self, work: MatcherCall) -> None: ...

    def receive(self) -> list[Verdict | MatcherReply]: ...

    def close(self) -> None: ...


class GrammarWorkers(Protocol):
    """Factory of workers: `WorkerProcesses` or `LocalWorkers` of `tok_core.grammar`.

    wakes  whether a message from a worker wakes a port that waits for the factory's file descriptor
    """

    wakes: bool

    def begin(self, grammar: Grammar) -> GrammarWorker: ...

    def close(self) -> None: ...


class GrammarState:
    """A grammar, the worker that follows it, and the requests and sequences that it guides.

    first     mask of the first token of a text, once the grammar has been compiled
    ready     whether the worker has compiled it
    known     masks by the number that the worker refers to them by
    matchers  matcher states of sequences that have begun, by number
    waiting   numbers of the sequences that wait for the worker
    work      work to be sent to the worker
    since     time at which the worker last replied, or at which the present wait for it began
    losses    workers lost in a row
    """

    def __init__(self, grammar: Grammar, tenant: str) -> None:
        self.grammar = grammar
        self.tenant = tenant
        self.worker: GrammarWorker | None = None
        self.first: Mask | None = None
        self.ready = False
        self.known: dict[int, Mask] = {}
        self.matchers: dict[int, MatcherState] = {}
        self.requests: dict[int, Request] = {}
        self.work = MatcherCall([], [])
        self.waiting: set[int] = set()
        self.since = 0.0
        self.losses = 0


class MatcherState:
    """Matcher state of one sequence. Its worker has followed all its tokens, and those in `given`.

    request  request of the sequence, if its parameters restrict the tokens beside the grammar
    mask    tokens that the sequence may sample next
    given   forced tokens, the last first, that it samples one by one all the same
    free    tokens that it may sample after these
    tokens  all tokens that the worker has followed; if that worker is lost, another one replays them
    room    number of tokens that the sequence may still have
    unsent  request to its worker that has not been sent, with the call that it belongs to
    draft   tokens that may follow, and the probabilities that they are accepted
    ahead   masks after these tokens, as far as the grammar allows them
    slot    slot in which the sequence waits for the worker; −1 while it does not
    """

    __slots__ = (
        *("ahead", "draft", "free", "given", "grammar_state", "mask", "number", "request", "room", "slot", "tokens"),
        "unsent",
    )

    def __init__(self, grammar_state: GrammarState, number: int, first: Mask, request: Request | None) -> None:
        self.grammar_state = grammar_state
        self.number = number
        self.request = request
        self.mask = self.free = first
        self.given: list[int] = []
        self.tokens: list[int] = []
        self.slot = -1
        self.room = 0
        self.unsent: tuple[MatcherCall, FollowRequest] | None = None
        self.draft: tuple[list[int], list[float]] = ([], [])
        self.ahead: list[Mask] = []


class GrammarPool:
    """Grammars in use, and grammars without requests that keep their workers for later ones.

    states  by grammar, in order of last use
    """

    def __init__(self, workers: GrammarWorkers, faults: Faults, clock: Callable[[], float]) -> None:
        self.workers = workers
        self.states: dict[Grammar, GrammarState] = {}
        self._faults = faults
        self._clock = clock
        self._touched: dict[Grammar, GrammarState] = {}  # grammars with work to be sent

    def use(self, request: Request, grammar: Grammar) -> GrammarState:
        """Return the state of the request's grammar, a new one if it has none, and add the request to it."""
        state = self.states.pop(grammar, None) or GrammarState(grammar, request.tenant)
        self.states[grammar] = state
        state.requests[request.rid] = request
        return state

    def compile_some(self) -> None:
        """Start compiling grammars that requests wait for, as many as may be compiled at once.

        The next one is of the caller with the fewest grammars being compiled.
        """
        compiling = Counter(one.tenant for one in self.states.values() if one.worker and not one.ready)
        wanted = [one for one in self.states.values() if one.worker is None and one.requests]
        while wanted and compiling.total() < MAX_COMPILING and self._may_start_worker():
            state = min(wanted, key=lambda one: compiling[one.tenant])
            wanted.remove(state)
            compiling[state.tenant] += 1
            self.start(state)

    def start(self, state: GrammarState) -> None:
        """Start a worker for the grammar. If that fails, all requests of the grammar fail."""
        state.since = self._clock()
        try:
            state.worker = self.workers.begin(state.grammar)
        except Exception as error:
            named = str(error) if isinstance(error, EngineError | OSError) else f"{type(error).__name__}: {error}"
            self._fail(state, f"the grammar cannot be compiled: {named}")

    def stop(self, state: GrammarState) -> None:
        """Stop the grammar's worker, if it has one. If that fails, it is logged, but no request fails."""
        worker, state.worker = state.worker, None
        state.ready = False
        if worker is not None:
            try:
                worker.close()
            except Exception:
                log.exception("a worker of a grammar cannot be closed")

    def drop(self, state: GrammarState) -> None:
        """Stop the grammar's worker, and forget the grammar."""
        if self.states.get(state.grammar) is state:
            del self.states[state.grammar]
        self.stop(state)

    def touch(self, state: GrammarState) -> None:
        """Note that the grammar's worker has work to be sent."""
        self._touched[state.grammar] = state

    def send(self) -> None:
        """Send all queued work, in one message to each worker."""
        touched, self._touched = self._touched, {}
        for state in touched.values():
            if state.worker is not None and state.ready:
                work, state.work = state.work, MatcherCall([], [])
                try:
                    state.worker.send(work)
                except Exception as error:
                    self.fail(state, error)

    def fail(self, state: GrammarState, error: Exception) -> None:
        """Fail all requests of a grammar because of an exception, and drop the grammar."""
        self._fail(state, failure_of(error))

    def close(self) -> None:
        """Stop all workers, and their factory."""
        for state in list(self.states.values()):
            self.drop(state)
        self.workers.close()

    def _fail(self, state: GrammarState, reason: str) -> None:
        for rid in state.requests:
            self._faults.fail(rid, reason)
        self.drop(state)

    def _may_start_worker(self) -> bool:
        """Return whether one more worker may start; stop workers without requests beyond the limits."""
        working = [one for one in self.states.values() if one.worker is not None]
        idle = [one for one in working if not one.requests]
        for state in idle[: max(len(idle) - MAX_IDLE, len(working) + 1 - MAX_WORKERS, 0)]:
            self.drop(state)
            working.remove(state)
        return len(working) < MAX_WORKERS


def failure_of(error: Exception) -> str:
    """Log an exception that keeps a grammar from being followed, and return the reason to report."""
    log.error("a grammar cannot be followed", exc_info=error)
    return f"the grammar cannot be followed: {type(error).__name__}: {error}"
