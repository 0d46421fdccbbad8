"""Start processes of tests as forks of a server that has imported torch and the engine, so that each is ready soon."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LOADED = [
    "tok_core.replicas.processes.manager_process",
    "tok_core.worker.startup.setup",
    "tok_kernels.backends.reference",
    "support.batch_process",
    "support.parallel_models",
]


def fork_server() -> ForkServerContext:
    """Return the context of processes that one server forks; it starts with the first of them."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    context = get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context
