"""Entry points of manager and worker processes, the sockets between them, and the detection of hung processes."""

from __future__ import annotations

from tok_core.processes.child import FAULTY, start_beating, write_launch
from tok_core.processes.liveness import Liveness
from tok_core.processes.local_ports import Closed, LocalPorts
from tok_core.processes.sockets import Receiver, Sender

__all__ = ["FAULTY", "Closed", "Liveness", "LocalPorts", "Receiver", "Sender", "start_beating", "write_launch"]
