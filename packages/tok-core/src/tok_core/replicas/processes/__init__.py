"""Entry points of a replica's manager and worker processes."""

from __future__ import annotations

from tok_core.replicas.processes.child import FAULTY, run_child, start_beating, write_launch

__all__ = ["FAULTY", "run_child", "start_beating", "write_launch"]
