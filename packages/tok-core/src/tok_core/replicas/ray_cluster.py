"""Join a Ray cluster, and place replicas on its hosts."""

from __future__ import annotations

import ctypes
import logging
import queue
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from tok_core.config import EngineConfig
from tok_core.errors import EngineError, InvalidField

JOIN_SECONDS = 30.0  # for the cluster to answer
PLACEMENT_SECONDS = 60.0  # for devices to become free
REMOVAL_SECONDS = 10.0  # for Ray to finish placing a group that is to be removed
PLACEMENT_POLL_SECONDS = 1  # of each wait for a placement group; Ray drops fractions of seconds

_joined: list[str] = []  # the address given to `join_cluster`; empty if it has not connected this process


def join_cluster(config: EngineConfig) -> None:
    """Join the cluster at `config.ray` for the life of this process, unless the process is in one already.

    Raises InvalidField if the cluster has too few devices or the process is in another cluster, and EngineError if
    there is no cluster.
    """
    if not ray.is_initialized():
        _joined[:] = [str(config.ray)]
        _init(str(config.ray))
    elif _joined and config.ray not in ("auto", *_joined):
        raise InvalidField("ray", config.ray, f"{_joined[0]}, the cluster that this process has joined")
    kind, have = kind_of_bundle(config), ray.cluster_resources()
    needed = config.dp * config.pp * config.tp
    if needed > have.get(kind, 0):
        field = next((name for name in ("tp", "pp", "dp") if getattr(config, name) > 1), "ray")
        allowed = f"dp × pp × tp at most {have.get(kind, 0):g}, the {kind}s of the Ray cluster"
        raise InvalidField(field, getattr(config, field), allowed)


def kind_of_bundle(config: EngineConfig) -> str:
    """Return the resource that a worker's bundle consists of, "GPU" or "CPU".

    Raises InvalidField if the device is set to cuda and the cluster has no GPU.
    """
    has_gpu = ray.cluster_resources().get("GPU", 0) >= 1
    if config.device == "cuda" and not has_gpu:
        raise InvalidField("device", config.device, "cpu (the Ray cluster has no GPU)")
    return "GPU" if has_gpu and config.device != "cpu" else "CPU"


def await_placement(group: PlacementGroup, closing: Callable[[], bool]) -> None:
    """Wait until the group is placed, or `closing` returns True. Raise EngineError after PLACEMENT_SECONDS."""
    deadline = time.monotonic() + PLACEMENT_SECONDS
    while not group.wait(PLACEMENT_POLL_SECONDS) and not closing():
        if time.monotonic() > deadline:
            ((kind, _),) = group.bundle_specs[0].items()
            free = ray.available_resources().get(kind, 0)
            needed = f"{group.bundle_count} free {kind}s within {PLACEMENT_SECONDS:g} s"
            raise EngineError(f"the Ray cluster has not had {needed}; {free:g} are free")


def remove_placement(group: PlacementGroup) -> None:
    """Remove a group with everything that runs in it, after Ray has placed it or REMOVAL_SECONDS have passed.

    If a group is removed while Ray is placing it, resources reserved so far stay reserved for the life of the node.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    try:
        while not group.wait(PLACEMENT_POLL_SECONDS) and _is_being_placed(group) and time.monotonic() < deadline:
            pass
    finally:
        remove_placement_group(group)


def _is_being_placed(group: PlacementGroup) -> bool:
    return placement_group_table(group)["stats"]["scheduling_state"] in ("QUEUED", "SCHEDULING_STARTED")


def bundles_by_node(group: PlacementGroup) -> list[tuple[int, str]]:
    """Return the bundles of a placed group as (index, node id), grouped by node, largest number of bundles first."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    sizes = Counter(nodes.values())
    return sorted(nodes.items(), key=lambda item: (-sizes[item[1]], item[1], item[0]))


def node_capacity(node: str, kind: str) -> int:
    """Return how many resources of a kind a node has in total, and so how many workers it can hold."""
    return int(sum(entry["Resources"].get(kind, 0) for entry in ray.nodes() if entry["NodeID"] == node))


def _init(address: str) -> None:
    """Connect to Ray in a separate thread: in the main thread, Ray would replace the process's SIGTERM handler."""
    logging.getLogger("ray").setLevel(logging.ERROR)  # Ray would warn that it does not run in the main thread
    failures: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    threading.Thread(target=_try, args=(address, failures), name="ray-init", daemon=True).start()
    try:
        failure = failures.get(timeout=JOIN_SECONDS)
    except queue.Empty:
        failure = TimeoutError(f"no answer within {JOIN_SECONDS:g} s")
    if failure is not None:
        raise EngineError(f"there is no Ray cluster at {address} that this host is a node of: {failure}")


def _try(address: str, failures: queue.SimpleQueue[Exception | None]) -> None:
    try:
        if address != "auto":  # without a server at the address, Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=JOIN_SECONDS).close()
        with _own_handler_of_sigterm():
            ray.init(address=address, configure_logging=False)
    except Exception as error:
        failures.put(error)
    else:
        failures.put(None)


@contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Restore the process's SIGTERM handler afterwards: Ray installs a native one, which prints a stack."""
    libc, handler = ctypes.CDLL(None), ctypes.create_string_buffer(1024)  # large enough for a struct sigaction
    libc.sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, handler, None)
