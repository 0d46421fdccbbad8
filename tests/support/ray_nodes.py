"""A Ray cluster of two nodes on this machine, with one CPU each, as Ray's own tests have it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20  # nothing is kept there
TRIES = 3

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.update({"RAY_worker_niceness": "0"})  # else its processes would hardly start beside other tests
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = (
    "0"  # else Ray copies the workspace to each node; read when it is imported
)


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address to join it at. Whatever this process had joined of it is left at the end."""
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
    """A node gives itself 15 seconds to start, and the cluster 30: too few on a busy machine that has never done it."""
    for left in reversed(range(TRIES)):
        try:
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False)
            return
        except Exception:  # it has no name of its own
            if not left:
                raise
