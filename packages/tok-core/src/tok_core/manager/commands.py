"""Execute the engine's commands: pause and resume steps, clear the prefix cache, change the weights, sleep, wake up."""

from __future__ import annotations

from collections import deque
from typing import Protocol, assert_never

from tok_core.manager.intake import RequestIntake
from tok_core.manager.output_processor import OutputProcessor
from tok_core.manager.scheduling import Scheduler
from tok_core.messages import (
    ApplyStaged,
    CommandResult,
    DropStaged,
    EngineCommand,
    MemoryTag,
    MemoryTask,
    RebalanceExperts,
    ReceiveTensors,
    TaskResult,
    WeightsTask,
    WorkerTask,
)

REBALANCE = EngineCommand(0, "rebalance")
"""The manager's command to itself, which no engine gets an answer to."""


class CommandPorts(Protocol):
    """Connections that commands need besides those of `Ports`."""

    def answer(self, result: CommandResult) -> None:
        """Send the result of a command to the engine."""
        ...

    def send_task(self, task: WorkerTask) -> int:
        """Queue a task at all workers, and return how many there are."""
        ...

    def task_results(self) -> list[TaskResult]:
        """Return the results of workers that have come back, without waiting."""
        ...


class CommandExecutor:
    """Executor of commands, in the order of their arrival.

    holds  whether no step may be launched now: the engine is paused or sleeps, or a command waits for a worker
    """

    def __init__(
        self,
        scheduler: Scheduler,
        output_processor: OutputProcessor,
        intake: RequestIntake,
        ports: CommandPorts | None,
    ) -> None:
        self.holds = False
        self._scheduler = scheduler
        self._output_processor = output_processor
        self._intake = intake
        self._ports = ports
        self._paused = False
        self._asleep: set[MemoryTag] = set()
        self._commands: deque[EngineCommand] = deque()
        self._workers = 0  # whose results are still to come
        self._staging = False  # whether workers may have staged tensors; one that refused a tensor has none

    def take(self, command: EngineCommand) -> None:
        """Queue a command."""
        self._commands.append(command)
        self.holds = True

    def advance(self) -> None:
        """Execute commands as far as possible without waiting."""
        while self._commands:
            error = self._execute(self._commands[0])
            if error is None:
                return
            command = self._commands.popleft()
            if command is not REBALANCE:
                assert self._ports is not None
                self._ports.answer(CommandResult(command.number, error))
        self.holds = self._paused or bool(self._asleep)

    def _execute(self, command: EngineCommand) -> str | None:
        """Return the command's error, "" if it succeeded, or None if it has to wait."""
        match command.action:
            case "resume":
                self._paused = False
                return ""
            case "clear_cache":
                self._clear_cache()
                return ""
            case "pause":
                self._paused = True
                return None if self._output_processor.in_flight else ""
            case "retract":
                self._retract()
                return ""
            case "check_weights" | "load_weights":
                return self._change_weights(WeightsTask(command.weights, command.action == "load_weights"))
            case "transfer":
                assert command.task is not None
                if isinstance(command.task, ReceiveTensors | ApplyStaged | DropStaged):
                    self._staging = isinstance(command.task, ReceiveTensors)
                return self._change_weights(command.task)
            case "rebalance":  # staged tensors are those of the experts that a worker has now
                return "" if self._staging else self._run_task(RebalanceExperts())
            case "sleep":
                assert isinstance(command.task, MemoryTask)
                return self._sleep(command.task)
            case "wake_up":
                assert isinstance(command.task, MemoryTask)
                error = self._run_task(command.task)
                if error == "":
                    self._asleep.difference_update(command.task.tags)
                return error
            case _:
                assert_never(command.action)

    def _change_weights(self, task: WorkerTask) -> str | None:
        error = self._run_task(task)
        if error is not None and (isinstance(task, ApplyStaged) or (isinstance(task, WeightsTask) and task.write)):
            self._clear_cache()
        return error

    def _sleep(self, task: MemoryTask) -> str | None:
        """Release memory. After an error, nothing is computed either until `wake_up`, as at the other replicas."""
        if not self._output_processor.in_flight and not self._workers and "kv_cache" in task.tags:
            self._retract()
            self._clear_cache()
        error = self._run_task(task)
        if error is not None:
            self._asleep.update(task.tags)
        return error

    def _run_task(self, task: WorkerTask) -> str | None:
        """Let all workers execute the task; return an error, "" if there is none, or None if this has to wait."""
        if self._output_processor.in_flight:
            return None
        assert self._ports is not None
        if not self._workers:
            self._errors: list[str] = []
            self._workers = self._ports.send_task(task)
        for result in self._ports.task_results():
            self._workers -= 1
            self._errors += [result.error] if result.error else []
        if self._workers:
            return None
        return self._errors[0] if self._errors else ""

    def _retract(self) -> None:
        """Preempt all running sequences, and free what was kept for later samples of their requests."""
        scheduler = self._scheduler
        scheduler.reclaimer.preempt_for_slots(scheduler.table.active().tolist())
        scheduler.retained_prompts.drop_all()

    def _clear_cache(self) -> None:
        """Evict all pages that no sequence uses, and let requests that start from now on share no older ones."""
        paging = self._scheduler.paging
        self._scheduler.retained_prompts.drop_all()
        self._scheduler.reclaimer.settle()
        paging.evict_until_free(paging.available)
        self._intake.start_new_cache()
