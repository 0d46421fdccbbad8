"""Hold the state of each grammar, and of the matcher of each sequence that it guides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tok_core.grammar import Mask, MatcherCall, MatcherReply, Verdict
from tok_core.sampling_params import Grammar

if TYPE_CHECKING:
    from tok_core.manager.requests import Request


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

    def lost_all(self) -> bool: ...

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

    mask    tokens that the sequence may sample next
    given   forced tokens, the last first, that it samples one by one all the same
    free    tokens that it may sample after these
    tokens  all tokens that the worker has followed; if that worker is lost, another one replays them
    slot    slot in which the sequence waits for the worker; −1 while it does not
    """

    __slots__ = ("free", "given", "grammar_state", "mask", "number", "room", "slot", "tokens")

    def __init__(self, grammar_state: GrammarState, number: int, first: Mask) -> None:
        self.grammar_state = grammar_state
        self.number = number
        self.mask = self.free = first
        self.given: list[int] = []
        self.tokens: list[int] = []
        self.slot = -1
        self.room = 0
