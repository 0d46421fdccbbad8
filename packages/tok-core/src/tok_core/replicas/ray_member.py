"""RayWorker and RayManager: the Ray actors of a replica."""

from __future__ import annotations

import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec
import psutil
import ray
import zmq

from tok_core.config import EngineConfig, RankCoordinates
from tok_core.errors import Argument, ModelError, TokError, to_wire
from tok_core.messages import FromWorker, ProcessLaunch, Receiver, Rendezvous, ToManager, ToWorker, decoder
from tok_core.model_config import resolve, resolve_draft, resolve_tokenizer
from tok_core.replicas.processes import start_heartbeat
from tok_core.runtime import HEARTBEAT, configure_logging, pause_gc

log = logging.getLogger("tok_core")

NICENESS = "RAY_worker_niceness"  # environment variable that Ray reads when a node starts, and passes to its processes


class ActorLocation(msgspec.Struct, frozen=True):
    """Location of an actor: its host's address, its GPUs, its inboxes' addresses, and worker 0's rendezvous."""

    host: str
    pid: int
    gpus: tuple[str, ...]
    inboxes: tuple[str, ...]
    rendezvous: Rendezvous | None = None


class _Member(ABC):
    """Base of a replica's actors. Constructors bind inboxes, so that all addresses are known before any actor runs."""

    def __init__(self) -> None:
        self.host: str = ray.util.get_node_ip_address()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def inbox(self) -> str:
        """Return an address to bind an inbox to."""
        return f"tcp://{self.host}:*"

    def run(self, data: bytes, visible: Sequence[str]) -> tuple[str, tuple[Argument, ...]]:
        """Serve until an error occurs, and return the error as encoded by `to_wire`.

        data     an encoded `ProcessLaunch`
        visible  ids of the GPUs to make visible to CUDA
        """
        launch: ProcessLaunch = decoder(ProcessLaunch).decode(data)
        configure_logging(launch.role, launch.log_level, json=launch.json_log)
        reset_niceness()
        if visible:  # must precede the first use of CUDA
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        start_heartbeat(launch)
        try:
            with HEARTBEAT.coarse():  # the model may have to be fetched
                config = self._with_local_paths(launch.config)
            self.serve(msgspec.structs.replace(launch, config=config))
        except Exception as error:
            if not isinstance(error, TokError):
                log.exception("%s failed", launch.role)
            return to_wire(error)

    @abstractmethod
    def serve(self, launch: ProcessLaunch) -> NoReturn:
        """Run the actor's main loop."""

    def _with_local_paths(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration with the model's directory on this host."""
        try:
            paths = {"model": str(resolve(config.model, config.data_dir, config.revision))}
            if config.tokenizer is not None:
                paths["tokenizer"] = str(resolve_tokenizer(config.tokenizer, config.data_dir))
            if config.draft is not None:
                paths["draft"] = str(resolve_draft(config.draft, config.data_dir))
            return msgspec.structs.replace(config, **paths)
        except ModelError as error:
            raise ModelError(f"{error} (on host {self.host}; each host needs the model)") from None


class RayWorker(_Member):
    """Actor of one worker of a replica."""

    def __init__(self, coordinates: RankCoordinates) -> None:
        super().__init__()
        self._coordinates = coordinates
        self._steps: Receiver[ToWorker] = Receiver(self.context, self.inbox(), ToWorker)
        self._listener = None
        if coordinates.number == 0 and coordinates.workers > 1:
            self._listener = socket.create_server((self.host, 0))

    def location(self) -> ActorLocation:
        """Return the location of this worker, for the other actors."""
        gpus = tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        rendezvous = None if self._listener is None else Rendezvous(self.host, self._listener.getsockname()[1])
        return ActorLocation(self.host, os.getpid(), gpus, (self._steps.address,), rendezvous)

    def serve(self, launch: ProcessLaunch) -> NoReturn:
        with pause_gc():
            from tok_core.replicas.processes.worker_process import run_worker

        if self._listener is not None:
            assert isinstance(launch.rendezvous, Rendezvous)
            rendezvous = msgspec.structs.replace(launch.rendezvous, listener=self._listener.detach())
            launch = msgspec.structs.replace(launch, rendezvous=rendezvous)
        interface = _interface(self.host)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else Gloo may choose one that others cannot reach
        run_worker(self.context, launch, self._coordinates, self._steps)


class RayManager(_Member):
    """Actor of the manager of a replica."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: Receiver[list[ToManager]] = Receiver(self.context, self.inbox(), list[ToManager])
        self._outputs: Receiver[FromWorker] = Receiver(self.context, self.inbox(), FromWorker)

    def location(self) -> ActorLocation:
        """Return the location of this manager, for the other actors."""
        return ActorLocation(self.host, os.getpid(), (), (self._requests.address, self._outputs.address))

    def serve(self, launch: ProcessLaunch) -> NoReturn:
        with pause_gc():
            from tok_core.replicas.processes.manager_process import run_manager

        run_manager(self.context, launch, self._requests, self._outputs)


def _interface(host: str) -> str | None:
    """Return the network interface that has the address, if any."""
    interfaces: dict[str, str] = {
        entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries
    }
    return interfaces.get(host)


def reset_niceness() -> None:
    """Reset this process's niceness, which Ray raises, to 0, unless the user has set `NICENESS`."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= 0 or NICENESS in os.environ:
        return
    try:
        for thread in psutil.Process().threads():
            with suppress(ProcessLookupError):  # the thread has ended
                os.setpriority(os.PRIO_PROCESS, thread.id, 0)
    except PermissionError:
        log.warning("runs at niceness %d, which it may not change: start Ray's nodes with %s=0", niceness, NICENESS)
