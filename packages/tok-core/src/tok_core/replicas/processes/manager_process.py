"""Run the manager process: a single-threaded loop between the engine's sockets and the workers' sockets."""

from __future__ import annotations

from itertools import chain
from typing import NoReturn

import zmq

from tok_core.errors import ModelError
from tok_core.grammar import GrammarLimits, WorkerProcesses
from tok_core.manager import Manager
from tok_core.messages import (
    CommandResult,
    EngineInfo,
    FromWorker,
    ProcessLaunch,
    Progress,
    Receiver,
    Sender,
    StepInput,
    StepOutput,
    TaskResult,
    ToManager,
    WorkerTask,
    encode,
)
from tok_core.runtime import freeze_gc_heap
from tok_core.text import Tokenizer


class SocketPorts:
    """The manager's `Ports` over sockets. All workers receive every step; one of them returns its tokens."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        launch: ProcessLaunch,
        requests: Receiver[list[ToManager]],
        outputs: Receiver[FromWorker],
    ) -> None:
        self._requests = requests
        self._outputs = outputs
        self._steps = [Sender(context, address) for address in launch.steps]
        self._reports = Sender(context, launch.reports)
        self._task_results: list[TaskResult] = []
        self._poller = zmq.Poller()
        self._poller.register(self._requests.socket, zmq.POLLIN)
        self._poller.register(self._outputs.socket, zmq.POLLIN)

    def await_worker(self) -> EngineInfo:
        """Wait for the first message of the worker that returns tokens: all workers are ready then."""
        info = self._outputs.wait(None)
        assert isinstance(info, EngineInfo)
        return info

    def announce(self, info: EngineInfo) -> None:
        """Report to the engine that the replica is ready for requests."""
        self._reports.send(info)

    def requests(self) -> list[ToManager]:
        return list(chain.from_iterable(self._requests.all()))

    def outputs(self) -> list[StepOutput]:
        arrived = self._outputs.all()
        outputs = [output for output in arrived if isinstance(output, StepOutput)]
        if len(outputs) < len(arrived):
            self._task_results += [message for message in arrived if isinstance(message, TaskResult)]
        return outputs

    def send(self, step: StepInput) -> None:
        data = encode(step)
        for worker in self._steps:
            worker.send_bytes(data)

    def report(self, progress: Progress) -> None:
        self._reports.send(progress)

    def answer(self, result: CommandResult) -> None:
        self._reports.send(result)

    def send_task(self, task: WorkerTask) -> int:
        for worker in self._steps:
            worker.send(task)
        return len(self._steps)

    def task_results(self) -> list[TaskResult]:
        arrived, self._task_results = self._task_results, []
        return arrived

    def wait(self, seconds: float) -> None:
        self._poller.poll(int(seconds * 1000))

    def watch(self, descriptor: int) -> None:
        """Make `wait` return also when the descriptor is readable."""
        self._poller.register(descriptor, zmq.POLLIN)


def load_tokenizer(model: str) -> Tokenizer | None:
    """Load the model's tokenizer, needed for stop strings and grammars; return None if the model has no usable one."""
    try:
        return Tokenizer.load(model)
    except ModelError:
        return None


def run_manager(
    context: zmq.Context[zmq.Socket[bytes]],
    launch: ProcessLaunch,
    requests: Receiver[list[ToManager]],
    outputs: Receiver[FromWorker],
) -> NoReturn:
    """Run the manager."""
    ports = SocketPorts(context, launch, requests, outputs)
    tokenizer_path = launch.config.tokenizer or launch.config.model
    tokenizer = load_tokenizer(tokenizer_path)
    info = ports.await_worker()
    pieces = None if tokenizer is None else tokenizer.pieces
    workers = WorkerProcesses(GrammarLimits(tokenizer_path, info.vocab_size, info.eos_token_ids))
    ports.watch(workers.fileno())
    manager = Manager(launch.config, info, ports, pieces, tokenizer=tokenizer, workers=workers, command_ports=ports)
    freeze_gc_heap()
    ports.announce(info)
    manager.run()
