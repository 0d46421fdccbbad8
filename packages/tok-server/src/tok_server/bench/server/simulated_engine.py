"""Run an engine whose worker process computes nothing, to measure a server's cost. Manager and processes are real."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import psutil

from tok_core.config import EngineConfig
from tok_core.engine import AsyncEngine
from tok_core.messages import EngineInfo, ProcessLaunch, Receiver, Sender, StepInput, ToWorker
from tok_core.replicas import Death, MakeReplica, ProcessReplica, Replica, Report, run_child
from tok_core.runtime import HEARTBEAT, MAX_TURN_SECONDS
from tok_core.text import Tokenizer
from tok_server.bench.manager.simulation import SimulatedWorker, endless_lengths

if TYPE_CHECKING:
    import zmq

PAGE, MAX_MODEL_LEN = 16, 1024  # tokens


class SimulatedEngine(AsyncEngine):
    """Engine with `model`'s tokenizer that generates random tokens without end.

    The model's own maximum length is ignored.

    step_seconds  seconds per step, during which the worker sleeps
    """

    def __init__(self, model: str, max_running: int, *, step_seconds: float = 0.0) -> None:
        self._step_seconds = step_seconds
        self._simulated: list[_SimulatedReplica] = []
        super().__init__(EngineConfig(model=model, device="cpu", max_running=max_running))

    def _replica_maker(self) -> MakeReplica:
        def make(config: EngineConfig, index: int, report: Report, death: Death) -> Replica:
            replica = _SimulatedReplica(self._step_seconds, config, index, report, death)
            self._simulated.append(replica)
            return replica

        return make

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of manager and worker until now."""
        found = 0.0
        for process in self._simulated[-1].children.values():
            times = psutil.Process(process.pid).cpu_times()
            found += times.user + times.system
        return found


class _SimulatedReplica(ProcessReplica):
    def __init__(self, step_seconds: float, config: EngineConfig, index: int, report: Report, death: Death) -> None:
        super().__init__(config, index, report, death)
        self.program = f"from tok_server.bench.server.simulated_engine import main; main({step_seconds!r})"


def main(step_seconds: float) -> NoReturn:
    """Run a child process of the engine, like `tok_core.replicas.run_child`."""
    run_child(partial(_run_worker, step_seconds))


def _run_worker(
    step_seconds: float, context: zmq.Context[zmq.Socket[bytes]], launch: ProcessLaunch, steps: Receiver[ToWorker]
) -> NoReturn:
    """Run the steps of the simulated worker."""
    tokenizer, running = Tokenizer.load(launch.config.model), launch.config.max_running
    assert running is not None
    info = EngineInfo(
        vocab_size=len(tokenizer.pieces),
        eos_token_ids=(len(tokenizer.pieces) - 1,),
        max_model_len=MAX_MODEL_LEN,
        num_pages=running * (MAX_MODEL_LEN // PAGE + 2),
        page_size=PAGE,
        max_running=running,
        max_step_tokens=2 * running,
        device="none",
        dtype="none",
        backend="simulated",
    )
    worker, outputs = SimulatedWorker(info, endless_lengths), Sender(context, launch.outputs)
    outputs.send(info)
    over = time.monotonic()
    while True:
        HEARTBEAT.turned()
        step = steps.wait(MAX_TURN_SECONDS)
        if isinstance(step, StepInput):
            over = max(over, time.monotonic()) + step_seconds
            output = worker.run(step, step_seconds)
            time.sleep(max(over - time.monotonic(), 0.0))
            outputs.send(output)
