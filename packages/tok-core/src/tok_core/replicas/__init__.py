"""Replicas of an engine: start, supervise and restart them, on this host or by Ray, and route requests to them."""

from __future__ import annotations

from tok_core.replicas.processes import run_child
from tok_core.replicas.replica import Death, ProcessReplica, Replica, Report
from tok_core.replicas.replica_set import Health, MakeReplica, ReplicaSet
from tok_core.replicas.router import Router, RoutingRequest

__all__ = [
    "Death",
    "Health",
    "MakeReplica",
    "ProcessReplica",
    "Replica",
    "ReplicaSet",
    "Report",
    "Router",
    "RoutingRequest",
    "run_child",
]
