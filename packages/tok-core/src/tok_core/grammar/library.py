"""Library: the grammars that are compiled, and threads that compile others beside the manager's loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from tok_core.grammar.kinds import Grammar
from tok_core.grammar.lean import preload

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiled, Compiler
    from tok_core.text.tokenizer import Tokenizer

MOST_BYTES = 256 << 20  # of compiled grammars that are kept for requests to come


def loader(
    model: str, vocab_size: int, end_ids: Sequence[int], tokenizer: Tokenizer | None = None
) -> Callable[[], Compiler]:
    """What makes the compiler for a model directory, in a process of the engine's own; see `Compiler.load`."""

    def load() -> Compiler:
        preload()
        from tok_core.grammar.compiler import Compiler

        return Compiler.load(model, vocab_size, end_ids, tokenizer)

    return load


class Library:
    """Compiles each grammar once, and keeps those asked for last.

    load  makes the compiler; called at the first grammar, in a thread
    most  bytes that are kept; what requests hold beyond that lives as long as they do
    """

    def __init__(self, load: Callable[[], Compiler], most: int = MOST_BYTES) -> None:
        self._load = load
        self._most = most
        self._bytes = 0
        self._ready: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._pending: dict[Grammar, Future[Compiled]] = {}
        self._threads = ThreadPoolExecutor(1, "grammars")
        self._compiler: Compiler | None = None

    def find(self, grammar: Grammar) -> Compiled | None:
        """The compiled grammar; None while it is being compiled, which this begins. Raises what kept it from that."""
        found = self._ready.get(grammar)
        if found is not None:
            self._ready.move_to_end(grammar)
            return found
        if grammar not in self._pending:
            self._pending[grammar] = self._threads.submit(self._compile, grammar)
            return None
        if not self._pending[grammar].done():
            return None
        return self._keep(grammar, self._pending.pop(grammar).result())

    def sweep(self, wanted: Set[Grammar]) -> None:
        """Of the others that are being compiled, keeps those that are done and gives up those that have not begun."""
        for grammar in self._pending.keys() - wanted:
            future = self._pending[grammar]
            if not (future.cancel() or future.done()):
                continue
            del self._pending[grammar]
            if not future.cancelled() and future.exception() is None:
                self._keep(grammar, future.result())

    def close(self) -> None:
        """Compiles no more; what is being compiled is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _keep(self, grammar: Grammar, compiled: Compiled) -> Compiled:
        self._ready[grammar] = compiled
        self._bytes += compiled.bytes
        while self._bytes > self._most and len(self._ready) > 1:
            self._bytes -= self._ready.popitem(last=False)[1].bytes
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler.compile(grammar)
