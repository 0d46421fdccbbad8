"""Run a worker process: launch steps as they arrive; a second thread returns their tokens as they become ready."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from pathlib import Path
from typing import NoReturn

import torch
import zmq

from tok_core.config import RankCoordinates
from tok_core.messages import ProcessLaunch, Receiver, Sender, StepInput, ToWorker
from tok_core.replicas.processes.failure_report import report_failure
from tok_core.runtime import HEARTBEAT, MAX_TURN_SECONDS, freeze_gc_heap
from tok_core.worker import LaunchedStep, set_up

IDLE_SECONDS = 0.02  # without a step, after which a worker with an idle device captures a CUDA graph for later steps


def run_worker(
    context: zmq.Context[zmq.Socket[bytes]],
    launch: ProcessLaunch,
    coordinates: RankCoordinates,
    steps: Receiver[ToWorker],
    compiler: subprocess.Popen[bytes] | None = None,
) -> NoReturn:
    """Run a worker. `compiler`: see `set_up`."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(leave_one_core(len(os.sched_getaffinity(0)), launch.workers_on_host))
    rendezvous = Path(launch.rendezvous) if isinstance(launch.rendezvous, str) else launch.rendezvous
    runner, info = set_up(
        *(launch.config, launch.replica, coordinates, rendezvous, launch.device, launch.workers_on_host, compiler)
    )
    freeze_gc_heap()
    launched: queue.SimpleQueue[LaunchedStep] = queue.SimpleQueue()
    outputs = Sender(context, launch.outputs) if coordinates.returns else None
    results = Sender(context, launch.outputs)
    if outputs is not None:
        outputs.send(info)
    threading.Thread(target=_return_outputs, args=(launched, outputs, launch), name="outputs", daemon=True).start()
    while True:
        HEARTBEAT.turned()
        step = steps.wait(IDLE_SECONDS if runner.graphs.missing else MAX_TURN_SECONDS)
        if isinstance(step, StepInput):
            launched.put(runner.launch(step))
        elif step is not None:
            results.send(runner.execute(step))
        elif runner.is_idle:  # a capture beside a long step would delay the launch of the next one
            runner.graphs.capture_missing()


def leave_one_core(cores: int, workers: int) -> int:
    """Return the CPU threads of each worker. One core stays free, else manager, server and workers delay each other."""
    return max(1, (cores - 1) // workers)


def _return_outputs(launched: queue.SimpleQueue[LaunchedStep], outputs: Sender | None, launch: ProcessLaunch) -> None:
    """Send the outputs of launched steps. Device errors surface here, in waiting for results; they end the process."""
    try:
        while True:
            output = launched.get().output()
            if outputs is not None:
                outputs.send(output)
    except BaseException as error:
        report_failure(launch, error)
        os._exit(1)
