"""LocalPorts: connect manager and worker within one process, which launches each step when it is sent."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tok_core.manager import MIN_QUEUED_STEPS
from tok_core.messages import (
    CommandResult,
    Progress,
    StepInput,
    StepOutput,
    TaskResult,
    ToEngine,
    ToManager,
    WorkerTask,
)

if TYPE_CHECKING:
    from tok_core.worker import LaunchedStep, Runner


class LocalPorts:
    """`Ports` of a manager that calls its worker directly, with outputs delayed as from a worker process.

    A step's tokens are returned only when `run_ahead` steps are queued or nothing is left to schedule. So the manager
    schedules ahead of returned values, as it does between processes. A `run_ahead` of None means two steps: the
    schedule does not depend on how long steps take.
    """

    def __init__(self, runner: Runner, run_ahead: int | None, report: Callable[[ToEngine], None]) -> None:
        self._runner = runner
        self._run_ahead = MIN_QUEUED_STEPS if run_ahead is None else run_ahead
        self._report = report
        self._inbox: queue.SimpleQueue[ToManager | None] = queue.SimpleQueue()
        self._arrived: list[ToManager] = []
        self._launched: deque[LaunchedStep] = deque()
        self._task_results: list[TaskResult] = []
        self._idle = False
        self.computing = False  # whether the worker is running, not the manager; stays True if the worker raises

    def submit(self, message: ToManager) -> None:
        """Queue a request or a cancellation; from any thread."""
        self._inbox.put(message)

    def close(self) -> None:
        """Make the manager's loop end with Closed; from any thread."""
        self._inbox.put(None)

    def requests(self) -> list[ToManager]:
        while not self._inbox.empty():
            self._receive(self._inbox.get())
        arrived, self._arrived = self._arrived, []
        return arrived

    def outputs(self) -> list[StepOutput]:
        if self._launched and (self._idle or len(self._launched) >= self._run_ahead):
            self._idle, self.computing = False, True
            output = self._launched.popleft().output()
            self.computing = False
            return [output]
        return []

    def send(self, step: StepInput) -> None:
        self.computing = True
        self._launched.append(self._runner.launch(step))
        self.computing = False

    def report(self, progress: Progress) -> None:
        self._report(progress)

    def answer(self, result: CommandResult) -> None:
        self._report(result)

    def send_task(self, task: WorkerTask) -> int:
        self.computing = True
        self._task_results.append(self._runner.execute(task))
        self.computing = False
        return 1

    def task_results(self) -> list[TaskResult]:
        arrived, self._task_results = self._task_results, []
        return arrived

    def wait(self, seconds: float) -> None:
        if self._launched:
            self._idle = True
            return
        try:
            self._receive(self._inbox.get(timeout=seconds))
        except queue.Empty:
            self.computing = True
            self._runner.graphs.capture_missing()
            self.computing = False

    def _receive(self, message: ToManager | None) -> None:
        if message is None:
            raise Closed
        self._arrived.append(message)


class Closed(Exception):
    """Raised in the manager's loop when its ports were closed, to end the loop."""
