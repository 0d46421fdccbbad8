"""Execute the engine's commands: pause and resume the launch of steps, clear the prefix cache, change the weights."""

from __future__ import annotations

from collections import deque
from typing import Protocol, assert_never

from tok_core.manager.intake import RequestIntake
from tok_core.manager.output_processor import OutputProcessor
from tok_core.manager.scheduling import Scheduler
from tok_core.messages import ApplyStaged, CommandResult, EngineCommand, TransferTask, WeightsResult, WeightsTask


class CommandPorts(Protocol):
    """Connections that commands need besides those of `Ports`."""

    def answer(self, result: CommandResult) -> None:
        """Send the result of a command to the engine."""
        ...

    def send_weights(self, task: WeightsTask | TransferTask) -> int:
        """Queue a task at all workers, and return how many there are."""
        ...

    def weights_results(self) -> list[WeightsResult]:
        """Return the results of workers that have come back, without waiting."""
        ...


class CommandExecutor:
    """Executor of commands, in the order of their arrival.

    holds  whether no step may be launched now: the engine is paused, or a command waits for a worker
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
        self._commands: deque[EngineCommand] = deque()
        self._workers = 0  # whose results are still to come

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
            assert self._ports is not None
            self._ports.answer(CommandResult(self._commands.popleft().number, error))
        self.holds = self._paused

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
            case "check_weights" | "load_weights" | "transfer":
                return None if self._output_processor.in_flight else self._task(command)
            case _:
                assert_never(command.action)

    def _task(self, command: EngineCommand) -> str | None:
        assert self._ports is not None
        write = command.action == "load_weights" or isinstance(command.task, ApplyStaged)
        if not self._workers:
            self._errors: list[str] = []
            self._workers = self._ports.send_weights(command.task or WeightsTask(command.weights, write))
        for result in self._ports.weights_results():
            self._workers -= 1
            self._errors += [result.error] if result.error else []
        if self._workers:
            return None
        if write:
            self._clear_cache()
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
