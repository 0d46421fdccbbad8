"""Check in background threads whether grammars can be compiled and followed; each grammar is checked once."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from tok_core.errors import EngineError, InvalidField, TokError
from tok_core.sampling_params import Grammar

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiled, Compiler

MAX_KNOWN_GRAMMARS: Final = 16_384  # verdicts, of which the least recently used are dropped
CPU_SECONDS: Final = 5
MEMORY: Final = 192 << 20  # bytes


class GrammarLimits(msgspec.Struct, frozen=True):
    """Model for which grammars are checked and followed, and resources that one grammar may use.

    model, vocab_size, end_ids  a model's directory, the number of its ids, and the ids that end a text
    cpu_seconds, memory         CPU seconds and bytes that compiling may take
    token_seconds               CPU seconds that advancing a sequence to its next mask may take
    sequence_seconds            CPU seconds that a sequence may take in all, plus `mean_seconds` per token
    niceness                    added to the niceness of the processes when they start

    All sequences of one grammar together may use half of `memory`. The limits apply to worker processes only.
    """

    model: str
    vocab_size: int
    end_ids: tuple[int, ...]
    cpu_seconds: int = CPU_SECONDS
    memory: int = MEMORY
    token_seconds: float = 1.0
    sequence_seconds: float = 5.0
    mean_seconds: float = 0.01
    niceness: int = 0

    @property
    def too_much(self) -> str:
        """Return the limits on compiling, as the allowed value in the error of a grammar that exceeds them."""
        return f"grammars that take at most {self.cpu_seconds} s of a CPU and {self.memory >> 20} MiB to compile"

    @property
    def too_slow(self) -> str:
        """Return the limits on following, as the allowed value in the error of a grammar that exceeds them."""
        bounds = f"{self.token_seconds:g} s of a CPU a token and {self.memory >> 21} MiB"
        return f"grammars whose texts can be followed in at most {bounds}: fewer alternatives that begin alike"


class Examiner(Protocol):
    """Interface for compiling a grammar to find out whether it can be used.

    stoppable  whether `stop` and `close` interrupt an `examine` that runs in another thread
    """

    stoppable: bool

    def examine(self, grammar: Grammar) -> str:
        """Return what is allowed instead of the grammar, or "" if it is accepted; slow. Raise EngineError."""
        ...

    def stop(self) -> None:
        """Make a stoppable `examine` that runs in another thread raise EngineError soon."""
        ...

    def close(self) -> None:
        """Release all resources, from any thread; a stoppable `examine` raises EngineError afterwards."""
        ...


class LocalExaminer:
    """Examiner that compiles in this process: for in-process engines, whose grammars come from the same program."""

    stoppable = False

    def __init__(self, task: GrammarLimits) -> None:
        self._task = task
        self._compiler: Compiler | None = None

    def examine(self, grammar: Grammar) -> str:
        from tok_core.grammar.compiler import Compiler

        if self._compiler is None:
            self._compiler = Compiler.load(self._task.model, self._task.vocab_size, self._task.end_ids)
        return verdict(self._compiler, grammar, self._task)[0]

    def stop(self) -> None:
        """Do nothing: compilation in this process cannot be interrupted."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _Check:
    """A grammar that is queued or being checked, and the futures of its callers."""

    def __init__(self, grammar: Grammar, tenant: str) -> None:
        self.grammar = grammar
        self.tenant = tenant  # of the first caller
        self.callers: list[Future[str]] = []
        self.examiner: Examiner | None = None

    @property
    def left(self) -> bool:
        """Return whether all callers have cancelled."""
        return all(caller.cancelled() for caller in self.callers)

    def let_go(self) -> list[Future[str]]:
        """Remove and return the callers, so that each is notified once."""
        callers, self.callers = self.callers, []
        return callers


class Checker:
    """Queue of grammar checks, run by examiners that check one grammar at a time each. Thread-safe.

    Tenants that occupy fewer examiners go first. If there are several examiners, no tenant occupies all of them.
    """

    def __init__(self, *examiners: Examiner) -> None:
        self._examiners = examiners
        self._idle = list(examiners)
        self._known: OrderedDict[bytes, str] = OrderedDict()  # verdicts by digest
        self._open: dict[bytes, _Check] = {}  # in order of arrival
        self._changed = threading.Condition(threading.RLock())
        self._threads: list[threading.Thread] = []
        self._closed = False

    def begin(self, grammar: Grammar, most: int | None = None, tenant: str = "") -> Future[str]:
        """Return a future with what is allowed instead of the grammar, or "" if it is accepted; done at once if known.

        Each caller has its own future: cancelling it does not affect others. A check whose callers have all cancelled
        is stopped. The future raises EngineError if the grammar cannot be checked.

        most    raise EngineError if the grammar is unknown and the tenant has this many other checks open
        tenant  an opaque name of the caller; "" if unknown
        """
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        with self._changed:
            if key in self._known:
                self._known.move_to_end(key)
                return _done(self._known[key])
            if self._closed:
                raise _closed()
            check = self._open.get(key)
            if check is None or (check.left and check.examiner is not None):  # a check without callers is being stopped
                self._check_room(most, tenant)
                self._open.pop(key, None)
                check = self._open[key] = _Check(grammar, tenant)
                self._start_thread()
            caller: Future[str] = Future()
            check.callers.append(caller)
            self._changed.notify()
        caller.add_done_callback(lambda caller: self._leave(key, check) if caller.cancelled() else None)
        return caller

    def close(self) -> None:
        """Fail all open checks, and wait for the threads unless an examiner cannot be stopped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for examiner in self._examiners:
            examiner.close()
        for thread in self._threads if all(one.stoppable for one in self._examiners) else ():
            thread.join()
        with self._changed:
            left, self._open = list(self._open.values()), {}
            callers = [caller for check in left for caller in check.let_go()]
        _tell(callers, _closed())

    def _check_room(self, most: int | None, tenant: str) -> None:
        if most is None:
            return
        if sum(check.tenant == tenant for check in self._open.values()) >= most:
            raise EngineError(f"{most} other grammars are being checked already; allowed: to try again later")

    def _leave(self, key: bytes, check: _Check) -> None:
        """Drop or stop the check if all of its callers have cancelled."""
        with self._changed:
            if not check.left:
                return
            if self._open.get(key) is check and check.examiner is None:
                del self._open[key]
            if check.examiner is not None and check.examiner.stoppable:
                check.examiner.stop()

    def _start_thread(self) -> None:
        if len(self._threads) < len(self._examiners):
            name = f"grammar-checks-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        """Check one grammar after the other and notify its callers."""
        while True:
            with self._changed:
                while not self._closed and (found := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
                assert found is not None
                key, check = found
                check.examiner = examiner = self._idle.pop()
            result = _examined(examiner, check.grammar)
            with self._changed:
                self._idle.append(examiner)
                if isinstance(result, str):
                    self._learn(key, result)
                if self._open.get(key) is check:
                    del self._open[key]
                callers = check.let_go()
                check.examiner = None
                self._changed.notify_all()
            _tell(callers, result)

    def _next(self) -> tuple[bytes, _Check] | None:
        """Return the first queued check of the tenants that occupy the fewest examiners; None if no check may start."""
        busy = Counter(check.tenant for check in self._open.values() if check.examiner is not None)
        most = max(1, len(self._examiners) - 1)
        waiting = [(key, one) for key, one in self._open.items() if one.examiner is None and busy[one.tenant] < most]
        return min(waiting, key=lambda pair: busy[pair[1].tenant], default=None)

    def _learn(self, key: bytes, found: str) -> None:
        self._known[key] = found
        if len(self._known) > MAX_KNOWN_GRAMMARS:
            self._known.popitem(last=False)


def _examined(examiner: Examiner, grammar: Grammar) -> str | TokError:
    """Return the verdict, or the error that prevented it."""
    try:
        return examiner.examine(grammar)
    except TokError as error:
        return error
    except Exception as error:
        failure = EngineError(f"the grammar cannot be checked: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


def _tell(callers: list[Future[str]], found: str | TokError) -> None:
    """Set the result of each future that has not been cancelled."""
    for caller in callers:
        if not caller.set_running_or_notify_cancel():
            continue
        if isinstance(found, str):
            caller.set_result(found)
        else:
            caller.set_exception(found)


def _closed() -> EngineError:
    return EngineError("grammars cannot be checked any more: the engine was closed")


def verdict(compiler: Compiler, grammar: Grammar, task: GrammarLimits) -> tuple[str, Compiled | None]:
    """Return what is allowed instead of the grammar and None, or "" and the compiled grammar."""
    try:
        return "", compiler.compile(grammar)
    except InvalidField as error:
        return error.allowed, None
    except MemoryError:
        return task.too_much, None


def refuse(grammar: Grammar, found: str) -> None:
    """Raise InvalidField("grammar") unless the verdict accepts the grammar."""
    if found:
        raise InvalidField("grammar", grammar.value, found)


def _done(found: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(found)
    return future
