"""A child process of an engine: reads its Launch from standard input, then is a manager or a worker.

Standard input is also the lifeline: it ends when the parent ends, however that came about, and so does the child.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import zmq

from tok_core.errors import TokError
from tok_core.messages import Beat, FromWorker, ProcessLaunch, StepInput, ToManager, decoder, encode
from tok_core.processes.failure_report import report_failure
from tok_core.processes.sockets import Receiver, Sender
from tok_core.runtime import HEARTBEAT, set_format

log = logging.getLogger("tok_core")

LENGTH = struct.Struct("<I")
BEAT_EVERY = 1.0  # seconds, at most
BEATS = 20  # within a step timeout, at least
FAULTY = 71  # exit status of a process that met an error which nobody foresaw
ORPHANED = 70  # exit status of a child whose parent is gone

Work = Callable[["zmq.Context[zmq.Socket[bytes]]", ProcessLaunch, Receiver[StepInput]], None]
"""What a worker does with the steps it is sent; never returns."""


def write_launch(stream: IO[bytes], launch: ProcessLaunch) -> None:
    """The parent's side: tells a child what to be. The stream stays open for as long as the child shall live."""
    data = encode(launch)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read_launch(stream: IO[bytes]) -> ProcessLaunch:
    """The child's side."""
    (length,) = LENGTH.unpack(stream.read(LENGTH.size))
    launch: ProcessLaunch = decoder(ProcessLaunch).decode(stream.read(length))
    return launch


def main(work: Work | None = None) -> int:
    """Runs until the lifeline ends, or fails and says why. `work`: a worker's; None: what a model's does."""
    # Signals of a terminal or a service manager reach the whole group: the parent drains, then ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    launch = read_launch(sys.stdin.buffer)
    set_format(launch.role, launch.log_level, json=launch.json_log)
    threading.Thread(target=_watch_lifeline, name="lifeline", daemon=True).start()
    start_beating(launch)
    try:
        _run(zmq.Context(), launch, work)
    except BaseException as error:
        report_failure(launch, error)
        os._exit(1 if isinstance(error, TokError) else FAULTY)
    os._exit(1)  # not by way of destructors: other threads still use sockets and the device


def start_beating(launch: ProcessLaunch) -> None:
    """Tell the engine from now on, in a thread, how often this process's main loop has turned."""
    threading.Thread(target=_send_beats, args=(launch,), name="heartbeat", daemon=True).start()


def _send_beats(launch: ProcessLaunch) -> None:
    reports = Sender(zmq.Context(), launch.reports)
    pause = min(BEAT_EVERY, launch.config.step_timeout / BEATS)
    while True:
        reports.send(Beat(launch.role, HEARTBEAT.beat()))
        time.sleep(pause)


def _run(context: zmq.Context[zmq.Socket[bytes]], launch: ProcessLaunch, work: Work | None) -> None:
    """Imports late: the manager process never loads torch, and the lifeline is watched during slow imports."""
    if launch.place is not None:
        steps: Receiver[StepInput] = Receiver(context, launch.steps[launch.place.number], StepInput)
        if work is not None:
            work(context, launch, steps)
        from tok_core.processes.worker_process import run_worker

        run_worker(context, launch, launch.place, steps)
    else:
        requests: Receiver[list[ToManager]] = Receiver(context, launch.requests, list[ToManager])
        outputs: Receiver[FromWorker] = Receiver(context, launch.outputs, FromWorker)
        from tok_core.processes.manager_process import run_manager

        run_manager(context, launch, requests, outputs)


def _watch_lifeline() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
