"""Check untrusted grammars in worker processes, which may die over a grammar without harm to the engine."""

from __future__ import annotations

import select
import threading
import time
from typing import Final

import msgspec

from tok_core.errors import EngineError
from tok_core.grammar.checker import Checker, GrammarLimits
from tok_core.grammar.matchers import Verdict
from tok_core.grammar.worker_processes.processes import WorkerLost, WorkerProcess, WorkerProcesses
from tok_core.grammar.worker_processes.worker import NICENESS
from tok_core.sampling_params import Grammar

EXAMINERS: Final = 4  # parallel checks, so that grammars that use their whole time limit do not block all others
PATIENCE: Final = 240.0  # seconds to wait for a verdict, on a busy CPU and with the start of the process


class ProcessExaminer:
    """Examiner that compiles each grammar in a worker process of its own. Several examiners may share `processes`."""

    stoppable = True

    def __init__(self, task: GrammarLimits, processes: WorkerProcesses | None = None) -> None:
        self._task = task
        self.processes = processes or WorkerProcesses(task)
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None

    def examine(self, grammar: Grammar) -> str:
        """See `Examiner`."""
        worker = self.processes.begin(grammar)
        with self._lock:
            self._worker = worker
        try:
            return self._verdict(worker)
        finally:
            with self._lock:
                self._worker = None
            worker.close()

    def stop(self) -> None:
        """See `Examiner`."""
        with self._lock:
            if self._worker is not None:
                self._worker.stop()

    def close(self) -> None:
        """See `Examiner`."""
        self.processes.close()

    def _verdict(self, worker: WorkerProcess) -> str:
        poller = select.poll()  # not `select.select`, which fails for descriptors above 1023
        deadline = time.monotonic() + PATIENCE
        while True:
            poller.register(worker.fileno(), select.POLLIN | (select.POLLOUT if worker.blocked else 0))
            if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise EngineError(f"grammars cannot be checked: nothing was said for {PATIENCE:g} s")
            try:
                messages = worker.receive()
            except WorkerLost as lost:
                if worker.stopped:
                    raise EngineError("the grammar is not checked any more: nobody waits for it") from None
                if self.processes.closed:
                    raise EngineError("grammars cannot be checked any more: the engine was closed") from None
                if lost.orphaned:
                    raise EngineError("grammars cannot be checked: the process that checks them has died") from None
                return self._task.too_much
            for message in messages:
                assert isinstance(message, Verdict)
                if message.failed:
                    raise EngineError(f"grammars cannot be checked: {message.failed}")
                return message.allowed


def process_checker(task: GrammarLimits) -> Checker:
    """Return a checker for untrusted grammars that checks several of them in parallel."""
    processes = WorkerProcesses(msgspec.structs.replace(task, niceness=NICENESS))
    return Checker(*(ProcessExaminer(task, processes) for _ in range(EXAMINERS)))
