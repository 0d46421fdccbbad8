"""A Ray cluster of two nodes on this machine, with one CPU each, as Ray's own tests have it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

STORE_BYTES = 80 << 20  # nothing is kept there

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = (
    "0"  # else Ray copies the workspace to each node; read when it is imported
)


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address to join it at. Whatever this process had joined of it is left at the end."""
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        cluster.add_node(**options)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()
