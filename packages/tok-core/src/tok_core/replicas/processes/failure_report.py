"""Report the error that ends a process to the engine."""

from __future__ import annotations

import logging

import zmq

from tok_core.errors import TokError, to_wire
from tok_core.messages import Failed, ProcessLaunch, Sender

log = logging.getLogger("tok_core")


def report_failure(launch: ProcessLaunch, error: BaseException) -> None:
    """Report the error that ends this process to the engine; from any thread."""
    if not isinstance(error, TokError):  # TokErrors need no traceback, and the parent raises them
        log.error("%s failed", launch.role, exc_info=error)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reports = Sender(context, launch.reports)
    reports.send(Failed(*to_wire(error)))
    reports.close(linger=2)
    context.term()
