"""Checker: whether grammars can be followed, each found out once, beside whoever asks."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from tok_core.errors import EngineError, InvalidField, TokError
from tok_core.grammar.kinds import Grammar

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiler

MOST_KNOWN: Final = 16_384
CPU_SECONDS: Final = 60
MEMORY: Final = 4 << 30


class Task(msgspec.Struct, frozen=True):
    """For whom grammars are examined, and what one may take.

    model, vocab_size, end_ids  a model's directory, how many ids it makes, and which of them end a text
    cpu_seconds, memory         seconds of a CPU, and bytes, for each grammar; only where a process of its own examines
    """

    model: str
    vocab_size: int
    end_ids: tuple[int, ...]
    cpu_seconds: int = CPU_SECONDS
    memory: int = MEMORY

    @property
    def too_much(self) -> str:
        """What is allowed instead of a grammar that takes more."""
        return f"grammars that take at most {self.cpu_seconds} s of a CPU and {self.memory >> 20} MiB to compile"


class Examiner(Protocol):
    """Who compiles a grammar to see whether that can be done.

    stoppable  whether `close` ends an `examine` that another thread is in
    """

    stoppable: bool

    def examine(self, grammar: Grammar) -> str:
        """What is allowed instead of it, "" if it is itself. Takes its time. Errors: EngineError."""
        ...

    def close(self) -> None:
        """From another thread: lets go of what it has; a stoppable `examine` raises EngineError after that."""
        ...


class LocalExaminer:
    """Compiles in this process: for those who ask about grammars of their own."""

    stoppable = False

    def __init__(self, task: Task) -> None:
        self._task = task
        self._compiler: Compiler | None = None

    def examine(self, grammar: Grammar) -> str:
        from tok_core.grammar.compiler import Compiler

        if self._compiler is None:
            self._compiler = Compiler.load(self._task.model, self._task.vocab_size, self._task.end_ids)
        return verdict(self._compiler, grammar, self._task)

    def close(self) -> None:
        """Nothing is held."""


class _Check:
    """A grammar that is being checked, or will be, and the futures of those who wait for it."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.callers: list[Future[str]] = []
        self.begun = False

    @property
    def left(self) -> bool:
        """Nobody waits for it any more, and nothing has been done for it."""
        return not self.begun and all(caller.cancelled() for caller in self.callers)

    def let_go(self) -> list[Future[str]]:
        """Those who are still to be told, each of whom is told once."""
        callers, self.callers = self.callers, []
        return callers


class Checker:
    """Asks examiners about grammars, each about one after the other. Thread-safe."""

    def __init__(self, *examiners: Examiner) -> None:
        self._examiners = examiners
        self._idle = list(examiners)
        self._known: OrderedDict[bytes, str] = OrderedDict()  # verdicts by digest
        self._open: dict[bytes, _Check] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(len(examiners), "grammar-checks")
        self._closed = False

    def begin(self, grammar: Grammar, most: int | None = None) -> Future[str]:
        """What is allowed instead of the grammar, "" if it is itself; done at once where that is known.

        The future is the caller's own: cancelled, it is no other's loss. Where nobody can tell, it raises EngineError.

        most  raises EngineError where the grammar is unknown and so many others are being checked
        """
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return _done(self._known[key])
            if self._closed:
                raise _closed()
            if key not in self._open:
                self._check_room(most)
                self._open[key] = _Check(grammar)
                self._threads.submit(self._check, key, self._open[key])
            caller: Future[str] = Future()
            self._open[key].callers.append(caller)
            return caller

    def close(self) -> None:
        """Checks under way fail, but one that cannot be stopped: nobody waits for its end."""
        with self._lock:
            self._closed = True
        for examiner in self._examiners:
            examiner.close()
        self._threads.shutdown(wait=all(one.stoppable for one in self._examiners), cancel_futures=True)
        with self._lock:
            left, self._open = list(self._open.values()), {}
            callers = [caller for check in left for caller in check.let_go()]
        _tell(callers, _closed())

    def _check_room(self, most: int | None) -> None:
        if most is None or len(self._open) < most:
            return
        for key in [key for key, check in self._open.items() if check.left]:
            del self._open[key]
        if len(self._open) >= most:
            raise EngineError(f"{most} other grammars are being checked already; allowed: to try again later")

    def _check(self, key: bytes, check: _Check) -> None:
        """Examines the grammar, unless nobody waits for it, and tells those who do."""
        with self._lock:
            if check.left and self._open.get(key) is check:
                del self._open[key]
            if check.left or self._closed:
                return
            check.begun = True
            examiner = self._idle.pop()
        found = _examined(examiner, check.grammar)
        with self._lock:
            self._idle.append(examiner)
            if isinstance(found, str):
                self._learn(key, found)
            if self._open.get(key) is check:
                del self._open[key]
            callers = check.let_go()
        _tell(callers, found)

    def _learn(self, key: bytes, found: str) -> None:
        self._known[key] = found
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)


def _examined(examiner: Examiner, grammar: Grammar) -> str | TokError:
    """The verdict, or why there is none."""
    try:
        return examiner.examine(grammar)
    except TokError as error:
        return error
    except Exception as error:
        failure = EngineError(f"the grammar cannot be checked: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


def _tell(callers: list[Future[str]], found: str | TokError) -> None:
    """Each that has not been cancelled."""
    for caller in callers:
        if not caller.set_running_or_notify_cancel():
            continue
        if isinstance(found, str):
            caller.set_result(found)
        else:
            caller.set_exception(found)


def _closed() -> EngineError:
    return EngineError("grammars cannot be checked any more: the engine was closed")


def verdict(compiler: Compiler, grammar: Grammar, task: Task) -> str:
    """What is allowed instead of the grammar, "" if it is itself."""
    try:
        compiler.compile(grammar)
    except InvalidField as error:
        return error.allowed
    except MemoryError:
        return task.too_much
    return ""


def refuse(grammar: Grammar, found: str) -> None:
    """Raises InvalidField("grammar") unless the verdict is that the grammar is allowed."""
    if found:
        raise InvalidField("grammar", grammar.value, found)


def _done(found: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(found)
    return future
