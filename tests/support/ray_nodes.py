"""Start a Ray cluster of two nodes with one CPU each on this machine, as Ray's own tests do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20  # the tests store nothing there
TRIES = 3

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.update({"RAY_worker_niceness": "0"})  # Ray's default is too low beside other tests
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = (
    "0"  # otherwise Ray copies the workspace to each node; Ray reads this when imported
)


@contextmanager
def two_nodes() -> Iterator[str]:
    """Run the cluster and yield its address; at the end this process leaves the cluster."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        _add_node(cluster)
        _add_node(cluster)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def _add_node(cluster: Cluster) -> None:
    """Add a node, with retries: Ray allows a node 15 s and a cluster 30 s, too little for a first start when busy."""
    for left in reversed(range(TRIES)):
        try:
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False)
            return
        except Exception:  # Ray raises a plain Exception
            if not left:
                raise
