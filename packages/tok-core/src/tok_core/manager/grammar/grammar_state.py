"""State of one request's grammar, and of the matcher of each of its sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tok_core.grammar import Mask, MatcherCall, MatcherReply, Verdict
from tok_core.sampling_params import Grammar

if TYPE_CHECKING:
    from tok_core.manager.sequences import Request


class GrammarWorker(Protocol):
    """See `grammar.processes.WorkerProcess` and `grammar.local.LocalWorker`."""

    @property
    def at(self) -> int: ...

    def send(self, work: MatcherCall) -> None: ...

    def receive(self) -> list[Verdict | MatcherReply]: ...

    def close(self) -> None: ...


class GrammarWorkers(Protocol):
    """See `grammar.processes.WorkerProcesses` and `grammar.local.LocalWorkers`.

    wakes  whether a port that waits for its descriptor wakes when a worker has said something
    """

    wakes: bool

    def begin(self, grammar: Grammar) -> GrammarWorker: ...

    def lost_all(self) -> bool: ...

    def close(self) -> None: ...


class GrammarState:
    """A grammar, the worker that follows it, and the requests and sequences that it guides.

    first      what a text may begin with, once the grammar has been compiled
    ready      whether the worker has compiled it
    known      masks that the worker speaks of by number
    followers  sequences that have begun, by number
    waiting    those that wait for the worker
    since      when the worker was last heard of
    losses     of workers, in a row
    """

    def __init__(self, grammar: Grammar, tenant: str) -> None:
        self.grammar = grammar
        self.tenant = tenant
        self.worker: GrammarWorker | None = None
        self.first: Mask | None = None
        self.ready = False
        self.known: dict[int, Mask] = {}
        self.followers: dict[int, MatcherState] = {}
        self.requests: dict[int, Request] = {}
        self.work = MatcherCall([], [])
        self.waiting: set[int] = set()
        self.since = 0.0
        self.losses = 0


class MatcherState:
    """The worker has followed all tokens that the sequence has, and those that are `given`.

    mask    what the sequence may sample next
    given   tokens, the last first, that it is to sample one by one although it has no choice
    free    what it may sample after these
    tokens  all that the worker has followed: another one follows them anew if it is lost
    slot    where the sequence waits for the worker; −1 while it does not
    """

    __slots__ = ("free", "given", "guide", "mask", "number", "room", "slot", "tokens")

    def __init__(self, guide: GrammarState, number: int, first: Mask) -> None:
        self.guide = guide
        self.number = number
        self.mask = self.free = first
        self.given: list[int] = []
        self.tokens: list[int] = []
        self.slot = -1
        self.room = 0
