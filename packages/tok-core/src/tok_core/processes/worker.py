"""The worker process: launches steps as they come; a second thread sends their tokens back as they are ready."""

from __future__ import annotations

import queue
import threading

import zmq

from tok_core.messages import Launch, StepInput
from tok_core.processes.sockets import Receiver, Sender
from tok_core.worker.runner import Launched
from tok_core.worker.setup import set_up


def run_worker(context: zmq.Context[zmq.Socket[bytes]], launch: Launch) -> None:
    """Never returns."""
    steps: Receiver[StepInput] = Receiver(context, launch.steps, StepInput)
    runner, info = set_up(launch.config)
    launched: queue.SimpleQueue[Launched] = queue.SimpleQueue()
    outputs = Sender(context, launch.outputs)
    outputs.send(info)
    threading.Thread(target=_return_outputs, args=(launched, outputs), name="outputs", daemon=True).start()
    while True:
        step = steps.wait(None)
        if step is not None:
            launched.put(runner.launch(step))


def _return_outputs(launched: queue.SimpleQueue[Launched], outputs: Sender) -> None:
    while True:
        outputs.send(launched.get().output())
