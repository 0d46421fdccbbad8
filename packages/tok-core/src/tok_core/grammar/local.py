"""Grammar workers without processes: grammars compile in a thread, and the caller's thread follows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from tok_core.errors import InvalidField
from tok_core.grammar.matchers import MatcherCall, MatcherReply, Matchers, Verdict
from tok_core.grammar.worker_processes import IDLE
from tok_core.grammar.xgrammar_imports import preload
from tok_core.sampling_params import Grammar

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiled, Compiler
    from tok_core.text import Tokenizer


def loader(model: str, vocab_size: int, end_ids: Sequence[int], tokenizer: Tokenizer | None) -> Callable[[], Compiler]:
    """Return a function that loads the compiler for a model directory in this process; see `Compiler.load`."""

    def load() -> Compiler:
        preload()
        from tok_core.grammar.compiler import Compiler

        return Compiler.load(model, vocab_size, end_ids, tokenizer)

    return load


class LocalWorker:
    """Worker without a process: for in-process engines, whose grammars come from the same program."""

    def __init__(self, future: Future[Compiled]) -> None:
        self._future = future
        self._matchers: Matchers | None = None
        self._answers: list[Verdict | MatcherReply] = []

    def send(self, work: MatcherCall) -> None:
        """Process the call at once; `receive` returns the reply."""
        assert self._matchers is not None
        self._matchers.end(work.ended)
        if work.follow:
            self._answers.append(self._matchers.answer([self._matchers.follow(one) for one in work.follow]))

    def receive(self) -> list[Verdict | MatcherReply]:
        """Return the messages since the last call."""
        if self._matchers is None and self._future.done():
            self._answers.append(self._verdict())
        answers, self._answers = self._answers, []
        return answers

    @property
    def at(self) -> int:
        """Return IDLE: a local worker cannot be lost over a sequence."""
        return IDLE

    def close(self) -> None:
        """Cancel the compilation unless it has started."""
        self._future.cancel()

    def _verdict(self) -> Verdict:
        try:
            compiled = self._future.result()
        except InvalidField as error:
            return Verdict(allowed=error.allowed)
        except Exception as error:
            return Verdict(failed=f"the grammar cannot be compiled: {type(error).__name__}: {error}")
        self._matchers = Matchers(compiled)
        return Verdict(begin=compiled.begin.tobytes(), first=compiled.first.tobytes())


class LocalWorkers:
    """Factory of local workers.

    load  loads the compiler; called in a thread for the first grammar
    """

    wakes = False

    def __init__(self, load: Callable[[], Compiler]) -> None:
        self._load = load
        self._compiler: Compiler | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")

    def begin(self, grammar: Grammar) -> LocalWorker:
        """Start to compile the grammar in a thread and return its worker."""
        return LocalWorker(self._thread.submit(self._compile, grammar))

    def close(self) -> None:
        """Cancel queued compilations; do not wait for the current one."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Compiled:
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler.compile(grammar)
