"""RayActors: place, start, watch and end the Ray actors of one replica together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tok_core.config import EngineConfig, RankCoordinates
from tok_core.errors import EngineError
from tok_core.messages import Failed, ProcessLaunch, encode
from tok_core.replicas.ray_cluster import (
    await_placement,
    bundles_by_node,
    kind_of_bundle,
    node_capacity,
    remove_placement,
)
from tok_core.replicas.ray_member import ActorLocation, RayManager, RayWorker
from tok_core.runtime import logs_json

log = logging.getLogger("tok_core")

POLL_SECONDS = 0.2  # seconds between checks of `closing`
ACTOR_START_SECONDS = 120.0  # for Ray to start the actors, before they load a model
ACTOR_END_SECONDS = 3.0  # for actors to end, which delays the report of a death; actors of a lost host never end


class RayActors:
    """Ray actors of one replica: a bundle of a placement group for each worker, the manager beside worker 0.

    For one thread at a time.

    closing   returns whether the replica is being closed; methods that wait return early then
    members   actors by role, the manager last
    location  host, GPUs and addresses of each actor, by role
    nodes     id of each worker's node, by role
    """

    def __init__(self, config: EngineConfig, closing: Callable[[], bool]) -> None:
        self._config = config
        self._closing = closing
        self._group: PlacementGroup | None = None
        self._runs: dict[Any, str] = {}  # object reference of each actor's `run`, and the actor's role
        self.members: dict[str, Any] = {}
        self.location: dict[str, ActorLocation] = {}
        self.nodes: dict[str, str] = {}

    def start(self) -> None:
        """Place and start all actors; return when all have started. Raise EngineError if an actor cannot start."""
        kind = kind_of_bundle(self._config)
        self._config = msgspec.structs.replace(self._config, device="cuda" if kind == "GPU" else "cpu")
        workers = self._config.rank_coordinates()
        self._group = placement_group([{kind: 1.0} for _ in workers], strategy="PACK")
        await_placement(self._group, self._closing)
        if self._closing():
            return
        bundles = bundles_by_node(self._group)
        resources = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1}
        for coordinates, (index, node) in zip(workers, bundles, strict=True):
            role = "worker" if coordinates.workers == 1 else f"worker {coordinates.number}"
            self.nodes[role] = node
            self.members[role] = self._actor(RayWorker, index, resources).remote(coordinates)
        self.members["manager"] = self._actor(RayManager, bundles[0][0], {"num_cpus": 0}).remote()
        self._locate()

    def run(self, replica: int, reports: str) -> None:
        """Make all actors serve; they send their reports to the address `reports`."""
        for role, coordinates in zip(self.members, [*self._config.rank_coordinates(), None], strict=True):
            launch = self.launch(role, coordinates, replica, reports)
            self._runs[self.members[role].run.remote(encode(launch), self.visible(role))] = role

    @property
    def requests(self) -> str:
        """Return the address at which the manager receives requests."""
        return self.location["manager"].inboxes[0]

    def ended(self) -> tuple[str, Failed | None] | None:
        """Return why an actor has ended while serving, and its `Failed`, if it sent one; None if all actors run.

        If several actors have ended, return the most likely cause.
        """
        done, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0)
        return min(map(self._end_of, done), key=_is_effect, default=None)

    def _end_of(self, run: Any) -> tuple[str, Failed | None]:
        role = self._runs[run]
        where = self.location[role]
        reason = f"the {role} process {where.pid} on host {where.host}"
        try:
            return f"{reason} ended", Failed(*ray.get(run))
        except RayError:  # Ray itself writes the details to standard error
            return f"{reason} died", None

    def end(self) -> None:
        """End all actors, wait for their end, and remove the placement group."""
        if self._group is None or not ray.is_initialized():  # actors do not outlive the connection to the cluster
            return
        try:
            for member in self.members.values():
                ray.kill(member)
            if self._runs:
                ray.wait(list(self._runs), num_returns=len(self._runs), timeout=ACTOR_END_SECONDS)
        except Exception:
            log.exception("a replica's actors cannot be ended")
        try:  # removing the group ends the remaining actors, too
            remove_placement(self._group)
        except Exception:
            log.exception("a replica's placement group cannot be removed")

    def _actor(self, kind: type, bundle: int, resources: dict[str, int]) -> Any:
        assert self._group is not None
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return ray.remote(kind).options(**resources, max_restarts=0, scheduling_strategy=where)

    def _locate(self) -> None:
        """Wait until all actors have reported their location."""
        roles = {member.location.remote(): role for role, member in self.members.items()}
        waiting, deadline = list(roles), time.monotonic() + ACTOR_START_SECONDS
        while waiting and not self._closing():
            done, waiting = ray.wait(waiting, timeout=POLL_SECONDS)
            for call in done:
                try:
                    self.location[roles[call]] = ray.get(call)
                except RayError as error:
                    raise EngineError(f"the {roles[call]} process cannot be started: {error}") from None
            if waiting and time.monotonic() > deadline:
                role = roles[waiting[0]]
                raise EngineError(f"Ray has not started the {role} process within {ACTOR_START_SECONDS:g} s")

    def launch(self, role: str, coordinates: RankCoordinates | None, replica: int, reports: str) -> ProcessLaunch:
        """Return the launch parameters of one actor. Needs the `location` of all."""
        workers, manager = [self.location[worker] for worker in self.nodes], self.location["manager"]
        visible = self.visible(role)
        return ProcessLaunch(
            role=role,
            log_level=log.getEffectiveLevel(),
            json_log=logs_json(),
            config=self._config,
            replica=replica,
            coordinates=coordinates,
            requests=manager.inboxes[0],
            reports=reports,
            steps=[worker.inboxes[0] for worker in workers],
            outputs=manager.inboxes[1],
            workers_on_host=1 if coordinates is None else self._max_workers_on(self.nodes[role]),
            rendezvous=workers[0].rendezvous or "",
            device=visible.index(self.location[role].gpus[0]) if visible else None,
        )

    def _max_workers_on(self, node: str) -> int:
        """Return how many workers a node may have: this replica's, and as many of other replicas as fit."""
        own, total = list(self.nodes.values()).count(node), self._config.dp * len(self.nodes)
        others = min(total - len(self.nodes), node_capacity(node, kind_of_bundle(self._config)) - own)
        return own + max(0, others)

    def visible(self, role: str) -> list[str]:
        """Return the GPUs of all of the replica's workers on this worker's node; they can read each other's memory."""
        if not self.location[role].gpus:
            return []
        neighbours = (other for other, node in self.nodes.items() if node == self.nodes[role])
        return [gpu for other in neighbours for gpu in self.location[other].gpus]


def _is_effect(end: tuple[str, Failed | None]) -> int:
    """Rank the end of a process by how likely another process's end caused it; the lowest rank is the cause.

    0  a TokError about the model or a setting, which is never an effect
    1  no message: the process died
    2  "EngineError": any other exception, as raised by processes that lose contact with a dead one
    """
    _, failed = end
    if failed is None:
        return 1
    return 2 if failed.kind == "EngineError" else 0
