"""Replicas of an engine: starting, supervising and restarting them, on this host or by Ray, and dispatching to them."""

from __future__ import annotations

from tok_core.replicas.replica import Death, ProcessReplica, Replica, Report
from tok_core.replicas.replica_set import Health, ReplicaSet
from tok_core.replicas.router import Router, RoutingRequest

__all__ = [
    "Death",
    "Health",
    "ProcessReplica",
    "Replica",
    "ReplicaSet",
    "Report",
    "Router",
    "RoutingRequest",
]
