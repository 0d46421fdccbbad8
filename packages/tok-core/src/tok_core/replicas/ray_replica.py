"""RayReplica: a replica whose manager and workers are actors of a Ray cluster, on the hosts that Ray chooses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import ray
import zmq

from tok_core.config import EngineConfig
from tok_core.errors import TokError, to_wire
from tok_core.messages import Failed, FromProcess, Receiver, Sender, ToManager
from tok_core.replicas.liveness import Liveness, ReportReader
from tok_core.replicas.ray_actors import RayActors
from tok_core.replicas.replica import Death, Report

log = logging.getLogger("tok_core")

POLL_SECONDS = 0.2  # seconds between checks whether all actors serve


class RayReplica:
    """Replica of Ray actors. One thread starts them, reads their reports, and ends them all when one has ended.

    Ray ends the actors when this process ends, for whatever reason.

    index  the replica's number in the engine
    model  a directory that all hosts have, or a hub id
    """

    def __init__(self, config: EngineConfig, index: int, report: Report, death: Death, *, model: str) -> None:
        path = Path(model).expanduser()
        config = msgspec.structs.replace(config, model=str(path.resolve()) if path.is_dir() else model)
        self._config = config
        self._index = index
        self._report = report
        self._death = death
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reader: ReportReader | None = None
        self._requests: Sender | None = None
        self.actors = RayActors(config, self._closing.is_set)
        self._thread = threading.Thread(target=self._run, name="ray-replica", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, messages: Sequence[ToManager]) -> None:
        with self._lock:
            if self._requests is not None:  # else the replica has just ended, and its death is about to be reported
                self._requests.send(messages)

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        by_request = False
        try:
            reason, by_request = self._serve()
        except BaseException as error:  # else the end of the thread would go unreported
            if not isinstance(error, TokError):
                log.exception("the replica failed")
            self._report(Failed(*to_wire(error)))
            reason = "the replica's actors cannot be started or watched"
        try:
            self._end()
        finally:
            if not self._closing.is_set():
                self._death(self, reason, by_request=by_request)

    def _serve(self) -> tuple[str, bool]:
        """Run the replica; return why it ended, and whether a request caused that."""
        self.actors.start()
        if self._closing.is_set():
            return "", False
        host = ray.util.get_node_ip_address()  # the address at which other hosts reach this one
        reports: Receiver[FromProcess] = Receiver(self._context, f"tcp://{host}:*", FromProcess)
        reader = self._reader = ReportReader(reports, self._report)
        with self._lock:
            self._requests = Sender(self._context, self.actors.requests)
        self.actors.run(self._index, reports.address)
        liveness = Liveness(self.actors.members, self._config)
        while not self._closing.is_set():
            reader.read(liveness, POLL_SECONDS)
            if hung := liveness.hung:
                return hung, hung.startswith("the manager")
            ended = self.actors.ended()
            if ended is not None:
                reason, failed = ended
                if failed is not None:
                    self._report(failed)
                # TokErrors that the manager raises have other kinds; "EngineError" is an unforeseen exception.
                unforeseen = failed is not None and failed.kind == "EngineError"
                return reason, unforeseen and reason.startswith("the manager")
        return "", False

    def _end(self) -> None:
        self.actors.end()
        if self._reader is not None:
            self._reader.close()
        with self._lock:
            if self._requests is not None:
                self._requests.close(linger=0)
                self._requests = None
        self._context.term()
