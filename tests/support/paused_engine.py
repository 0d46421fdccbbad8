"""Hold an engine in the middle of an answer, so that a test acts before the answer ends."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

from support.engines import manager_of
from support.patience import PATIENCE
from tok_core.messages import StepInput, Submit, ToManager
from tok_core.worker.runner import LaunchedStep

# Positions of a model and tokens of a request: enough that the request cannot end within a test.
ENDLESS_POSITIONS, ENDLESS = 1 << 16, 60_000


class Gate:
    """Let a number of steps pass; the engine's thread waits in the next step until `open`."""

    def __init__(self, steps: int) -> None:
        self._left: float = steps
        self._changed = threading.Condition()
        self.reached = threading.Event()  # set once a step waits at the gate

    def open(self) -> None:
        """Let all steps pass from now on."""
        with self._changed:
            self._left = math.inf
            self._changed.notify_all()

    def allow(self, steps: int) -> None:
        """Let at least `steps` steps pass from now on."""
        with self._changed:
            self._left = max(self._left, steps)
            self._changed.notify_all()

    def _pass(self) -> None:
        with self._changed:
            if not self._left:
                self.reached.set()
                assert self._changed.wait_for(lambda: self._left > 0, PATIENCE), "the gate was never opened"
            self._left -= 1


@contextmanager
def gated(engine: object, steps: int = 0, replica: int = 0) -> Iterator[Gate]:
    """Hold a replica of the engine after `steps` more steps, when the tokens of all but the last two are reported."""
    gate, runner = Gate(steps), manager_of(engine, replica).ports._runner  # type: ignore[attr-defined]
    launch = runner.launch

    def launch_later(step: StepInput) -> LaunchedStep:
        gate._pass()
        launched: LaunchedStep = launch(step)
        return launched

    runner.launch = launch_later
    try:
        yield gate
    finally:
        gate.open()
        del runner.launch


@contextmanager
def held(engine: object, steps: int = 20) -> Iterator[None]:
    """Hold the only replica `steps` steps after each request, until it is sent another message, such as to pause."""
    replica = engine._core._replica_set.records[0].replica  # type: ignore[attr-defined]
    send = replica.send

    with gated(engine, steps) as gate:

        def send_and_let_pass(messages: Sequence[ToManager]) -> None:
            send(messages)
            if all(isinstance(message, Submit) for message in messages):
                gate.allow(steps)
            else:
                gate.open()

        replica.send = send_and_let_pass
        try:
            yield
        finally:
            del replica.send


@contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """Suspend the processes; those that still exist resume when the context ends."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()
