"""Entry point of an engine's child process: read a `ProcessLaunch` from standard input, then run a manager or worker.

Standard input is also the lifeline: it closes when the parent ends for whatever reason, and the child exits.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, NoReturn

import zmq

from tok_core.errors import TokError
from tok_core.messages import Beat, FromWorker, ProcessLaunch, Receiver, Sender, ToManager, ToWorker, decoder, encode
from tok_core.replicas.processes.failure_report import report_failure
from tok_core.runtime import HEARTBEAT, configure_logging, is_first_start, pause_gc, start_compiler

log = logging.getLogger("tok_core")

LENGTH = struct.Struct("<I")
MAX_BEAT_SECONDS = 1.0  # between heartbeats
MIN_BEATS = 20  # minimum number of heartbeats within a step timeout
FAULTY_EXIT_STATUS = 71  # exit status of a process that ended with an exception other than TokError
ORPHANED_EXIT_STATUS = 70  # exit status of a child whose parent has ended

Work = Callable[["zmq.Context[zmq.Socket[bytes]]", ProcessLaunch, Receiver[ToWorker]], NoReturn]
"""Main loop of a worker, which receives steps."""


def write_launch(stream: IO[bytes], launch: ProcessLaunch) -> None:
    """Send a child its launch parameters, from the parent. The child lives as long as the stream stays open."""
    data = encode(launch)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read_launch(stream: IO[bytes]) -> ProcessLaunch:
    """Receive the launch parameters, in the child."""
    (length,) = LENGTH.unpack(stream.read(LENGTH.size))
    launch: ProcessLaunch = decoder(ProcessLaunch).decode(stream.read(length))
    return launch


def run_child(work: Work | None = None) -> NoReturn:
    """Run until the lifeline closes, or report the failure and exit.

    work  main loop of a worker; None: `run_worker`
    """
    # A terminal or service manager signals the whole process group. The parent drains first and then ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    launch = read_launch(sys.stdin.buffer)
    configure_logging(launch.role, launch.log_level, json=launch.json_log)
    threading.Thread(target=_watch_lifeline, name="lifeline", daemon=True).start()
    start_heartbeat(launch)
    try:
        _run(zmq.Context(), launch, work)
    except BaseException as error:
        report_failure(launch, error)
        # Skips destructors, since other threads still use sockets and the device.
        os._exit(1 if isinstance(error, TokError) else FAULTY_EXIT_STATUS)


def start_heartbeat(launch: ProcessLaunch) -> None:
    """Start a thread that sends the engine this process's heartbeats."""
    threading.Thread(target=_send_heartbeats, args=(launch,), name="heartbeat", daemon=True).start()


def _send_heartbeats(launch: ProcessLaunch) -> None:
    reports = Sender(zmq.Context(), launch.reports)
    pause = min(MAX_BEAT_SECONDS, launch.config.step_timeout / MIN_BEATS)
    while True:
        reports.send(Beat(launch.role, HEARTBEAT.beat()))
        time.sleep(pause)


def _run(context: zmq.Context[zmq.Socket[bytes]], launch: ProcessLaunch, work: Work | None) -> NoReturn:
    """Import and run the worker or the manager.

    Imports are local, so that the manager process never loads torch, and the lifeline is watched during slow imports.
    """
    if launch.coordinates is not None:
        steps: Receiver[ToWorker] = Receiver(context, launch.steps[launch.coordinates.number], ToWorker)
        if work is not None:
            work(context, launch, steps)
        compiler = _compiler(launch)  # imports torch while this process does, too
        with pause_gc():
            from tok_core.replicas.processes.worker_process import run_worker

        run_worker(context, launch, launch.coordinates, steps, compiler)
    else:
        requests: Receiver[list[ToManager]] = Receiver(context, launch.requests, list[ToManager])
        outputs: Receiver[FromWorker] = Receiver(context, launch.outputs, FromWorker)
        with pause_gc():
            from tok_core.replicas.processes.manager_process import run_manager

        run_manager(context, launch, requests, outputs)


def _compiler(launch: ProcessLaunch) -> subprocess.Popen[bytes] | None:
    """Start the process that compiles a worker's kernels if it is likely to be needed; else the worker does."""
    config = launch.config
    on_gpu = config.device != "cpu" and config.backend != "reference"
    if not on_gpu or len(config.rank_coordinates()) > 1 or not is_first_start(config.cache_dir):
        return None
    try:
        return start_compiler()
    except OSError as error:
        log.warning("the compiling process cannot be started yet (%s)", error)
        return None


def _watch_lifeline() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(ORPHANED_EXIT_STATUS)
