"""The worker process: launches steps as they come; a second thread sends their tokens back as they are ready."""

from __future__ import annotations

import os
import queue
import threading

import torch
import zmq

from tok_core.messages import Launch, StepInput
from tok_core.processes.child import report_failure
from tok_core.processes.sockets import Receiver, Sender
from tok_core.worker.runner import Launched
from tok_core.worker.setup import set_up


def run_worker(context: zmq.Context[zmq.Socket[bytes]], launch: Launch) -> None:
    """Never returns."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(leave_one_core(len(os.sched_getaffinity(0))))
    steps: Receiver[StepInput] = Receiver(context, launch.steps, StepInput)
    runner, info = set_up(launch.config)
    launched: queue.SimpleQueue[Launched] = queue.SimpleQueue()
    outputs = Sender(context, launch.outputs)
    outputs.send(info)
    threading.Thread(target=_return_outputs, args=(launched, outputs, launch), name="outputs", daemon=True).start()
    while True:
        step = steps.wait(None)
        if step is not None:
            launched.put(runner.launch(step))


def leave_one_core(cores: int) -> int:
    """Threads for a worker on a CPU: with no core left to manager and server, its threads wait for each other."""
    return max(1, cores - 1)


def _return_outputs(launched: queue.SimpleQueue[Launched], outputs: Sender, launch: Launch) -> None:
    """Errors of the device surface here, where its results are waited for: they end the process."""
    try:
        while True:
            outputs.send(launched.get().output())
    except Exception as error:
        report_failure(launch, error)
        os._exit(1)
