"""Entry points of a replica's manager and worker processes."""

from __future__ import annotations

from tok_core.replicas.processes.child import FAULTY_EXIT_STATUS, run_child, start_heartbeat, write_launch

__all__ = ["FAULTY_EXIT_STATUS", "run_child", "start_heartbeat", "write_launch"]
