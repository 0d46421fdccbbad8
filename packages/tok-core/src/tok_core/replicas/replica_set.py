"""Start the replicas of an engine, restart each when it dies, and combine their states."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Literal, Protocol, assert_never

import msgspec
import numpy as np

from tok_core.config import EngineConfig
from tok_core.errors import EngineClosed, EngineDead, EngineError, InvalidField, from_wire
from tok_core.messages import (
    EMPTY,
    CommandResult,
    EngineCommand,
    EngineInfo,
    Failed,
    Progress,
    Silence,
    Stats,
    ToEngine,
    ToManager,
)
from tok_core.replicas.replica import Death, ProcessReplica, Replica, Report, ThreadReplica
from tok_core.replicas.replica_record import ReplicaRecord, ReplicaState, combine_infos, sum_stats

log = logging.getLogger("tok_core")

EngineState = Literal["starting", "ready", "unresponsive", "restarting", "failed", "closed"]


class ReplicaHealth(msgspec.Struct, frozen=True):
    """State of one replica; `detail` gives the reason if it does not serve."""

    state: ReplicaState
    detail: str = ""


class Health(msgspec.Struct, frozen=True):
    """Health of the engine: `ok` if any replica serves; `detail` gives the reason for each replica that does not."""

    ok: bool
    state: EngineState
    detail: str = ""
    replicas: tuple[ReplicaHealth, ...] = ()


MakeReplica = Callable[[EngineConfig, int, Report, Death], Replica]
"""Constructor of a replica from the configuration, its number, and what to call with its reports and at its death."""


class ReplicaEvents(Protocol):
    """Handler of the replicas' events. Its methods are called on the replicas' threads."""

    def reported(self, replica: int, progress: Progress) -> None:
        """Handle a report of the replica with this number."""
        ...

    def answered(self, replica: int, result: CommandResult) -> None:
        """Handle the replica's answer to a command."""
        ...

    def lost(self, replica: int, reason: str) -> None:
        """Handle the death of a replica, which has not been restarted yet."""
        ...

    def settled(self) -> None:
        """Handle that a replica has begun to serve, or will not be restarted."""
        ...


class ReplicaSet:
    """Thread-safe supervisor of an engine's replicas.

    changed       the engine's lock, notified of every change of a state
    make_replica  None: threads, processes or Ray actors, as the configuration says

    `first_messages` are sent to each replica as soon as it has started.
    """

    _events: ReplicaEvents

    def __init__(
        self,
        config: EngineConfig,
        *,
        in_process: bool,
        changed: threading.Condition,
        make_replica: MakeReplica | None,
    ) -> None:
        self._config = config
        self._model_id = config.model
        self._make_replica = make_replica or _make_replica(config, in_process=in_process)
        self._changed = changed
        self._closed = False
        self.first_messages: tuple[EngineCommand, ...] = ()
        self._outbox: dict[Replica, list[ToManager]] = {}
        self.started = False  # whether all replicas have been ready at once
        self.info: EngineInfo | None = None  # set once `started`; see `combine_infos`
        self.records = [
            ReplicaRecord(number, config.max_restarts, config.restart_window) for number in range(config.dp)
        ]

    def start(self, config: EngineConfig, model_id: str, events: ReplicaEvents) -> None:
        """Begin to start all replicas. `config`: the engine's, with the model's directory; `model_id`: its name.

        `events` is called from now on. Raises InvalidField or EngineError if Ray cannot place the replicas.
        """
        if config.ray is not None:
            from tok_core.replicas.ray_cluster import join_cluster

            join_cluster(config)
        self._config, self._model_id, self._events = config, model_id, events
        for record in self.records:
            self._begin(record)

    def await_start(self) -> None:
        """Wait until all replicas are ready. Raise the error of one that failed, or EngineClosed; end no replica."""
        with self._changed:
            self._changed.wait_for(lambda: self.started or self.state != "starting")
            if self._closed:
                raise EngineClosed(self.detail)
            if not self.started:
                failed = next(record for record in self.records if record.state == "failed")
                raise failed.failure or EngineDead(self.detail)

    def drain(self, number: int) -> Replica | None:
        """Stop sending new requests to the replica, and return it, if it runs. Call `renew` afterwards.

        Raises EngineError while the replica is starting, draining or restarting.
        """
        with self._changed:
            record = self.records[number]
            if self._closed:
                raise EngineClosed(self.detail)
            if record.state not in ("ready", "unresponsive", "failed"):
                raise EngineError(f"replica {number} is {record.state} already")
            if record.state != "failed":
                record.drain()
                self._changed.notify_all()
            return record.replica

    def renew(self, number: int, replica: Replica | None) -> None:
        """End the replica that `drain` returned and start another; return once that serves, or raise its error.

        If the replica has died meanwhile, wait for the restart that its death has caused.
        """
        record = self.records[number]
        if replica is not None:
            replica.close()
        with self._changed:
            if ours := record.replica is replica and not self._closed and record.state in ("draining", "failed"):
                record.retire()
                self._changed.notify_all()
        if ours:
            try:
                self._events.lost(number, f"the replica was restarted: {record.detail}")
            finally:
                while self._begin_again(record):
                    pass
                self._events.settled()
        self._await_record(record)

    def _await_record(self, record: ReplicaRecord) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or record.state in ("ready", "failed"))
            if self._closed:
                raise EngineClosed(self.detail)
            if record.state == "failed":
                raise record.failure or EngineDead(f"replica {record.number} is failed: {record.detail}")

    def shut(self) -> list[Replica]:
        """Start no more replicas from now on, and return the running ones, which the caller has to close."""
        with self._changed:
            self._closed = True
            running = [record.replica for record in self.records if record.replica is not None]
            for record in self.records:
                record.replica = None
            self._changed.notify_all()
            return running

    @property
    def closed(self) -> bool:
        """Return whether `shut` was called."""
        return self._closed

    @property
    def serves(self) -> bool:
        """Return whether the state is "ready"."""
        return self.started and not self._closed and "ready" in [record.state for record in self.records]

    @property
    def computes(self) -> bool:
        """Return whether any replica computes open requests, even if it gets no new requests."""
        return not self._closed and any(
            record.state in ("ready", "unresponsive", "draining") for record in self.records
        )

    @property
    def state(self) -> EngineState:
        """Return the combined state. Once all replicas have been ready at the same time, it is "ready" if any is."""
        states = {record.state for record in self.records}
        if self._closed:
            return "closed"
        if not self.started:
            return "failed" if "failed" in states else "starting"
        if "ready" in states:
            return "ready"
        if "unresponsive" in states:
            return "unresponsive"
        return "restarting" if states & {"draining", "restarting"} else "failed"

    @property
    def detail(self) -> str:
        """Return why replicas do not serve; "" if all do."""
        if self._closed:
            return "the engine was closed"
        if len(self.records) == 1:
            return self.records[0].detail
        faulty = (record for record in self.records if record.detail)
        return "; ".join(f"replica {record.number} is {record.state}: {record.detail}" for record in faulty)

    def health(self) -> Health:
        """Return the combined state, and the state of each replica."""
        with self._changed:
            records = () if self._closed else self.records
            replicas = tuple(ReplicaHealth(record.state, record.detail) for record in records)
            return Health(self.state == "ready", self.state, self.detail, replicas)

    def ready(self) -> list[int]:
        """Return the numbers of the replicas that serve."""
        with self._changed:
            return [] if self._closed else [record.number for record in self.records if record.state == "ready"]

    def running(self) -> list[int]:
        """Return the numbers of the replicas that have started, whether or not they get new requests."""
        with self._changed:
            up = ("ready", "unresponsive", "draining")
            return [record.number for record in self.records if record.replica is not None and record.state in up]

    def send(self, number: int, message: ToManager, *, later: bool = False) -> None:
        """Send a message to a replica; ignored if the replica has died. `later`: wait for the next `flush`."""
        with self._changed:
            replica = self.records[number].replica
            if replica is not None:
                self._outbox.setdefault(replica, []).append(message)
            if not later:
                self.flush()

    def flush(self) -> None:
        """Send the queued messages."""
        with self._changed:
            outbox, self._outbox = self._outbox, {}
            for replica, messages in outbox.items():
                try:
                    replica.send(messages)
                except Exception:  # a message is at fault: send each by itself
                    self._send_each(replica, messages)

    def _send_each(self, replica: Replica, messages: list[ToManager]) -> None:
        failed = []
        for message in messages:
            try:
                replica.send([message])
            except Exception as error:
                if isinstance(message, EngineCommand):
                    raise  # no request is at fault
                log.exception("a request cannot be sent to its replica")
                failed.append((message.rid, f"the request cannot be sent: {type(error).__name__}: {error}"))
        number = next((record.number for record in self.records if record.replica is replica), None)
        if failed and number is not None:  # in a thread: a request's lock must be taken before the lock held here
            threading.Thread(target=self._events.reported, args=(number, failures(failed)), daemon=True).start()

    def stats(self) -> dict[str, float]:
        """Return `Stats` summed over replicas and restarts, and `restarts`, `replicas` and `replicas_ready`."""
        with self._changed:
            stats = msgspec.structs.asdict(sum_stats(record.stats() for record in self.records))
            restarts, ready = sum(record.restarts for record in self.records), len(self.ready())
        return {**stats, "restarts": restarts, "replicas": len(self.records), "replicas_ready": ready}

    def replica_stats(self) -> list[dict[str, float]]:
        """Return `Stats` of each replica, summed over its restarts, its `restarts`, and `ready` as 1 or 0."""
        with self._changed:
            ready = self.ready()
            return [
                {**msgspec.structs.asdict(record.stats()), "restarts": record.restarts, "ready": record.number in ready}
                for record in self.records
            ]

    def _begin(self, record: ReplicaRecord) -> None:
        with self._changed:  # either `shut` came before, and nothing starts, or it will return this replica
            if self._closed:
                return
            record.failure = None
            record.replica = self._make_replica(
                self._config, record.number, partial(self._receive, record), partial(self._die, record)
            )
            record.replica.start()

    def _receive(self, record: ReplicaRecord, message: ToEngine) -> None:
        match message:
            case Progress():
                with self._changed:
                    record.count(message.stats)
                self._events.reported(record.number, message)
            case CommandResult():
                self._events.answered(record.number, message)
            case EngineInfo():
                with self._changed:
                    record.mark_ready(message)
                    for command in self.first_messages:
                        self.send(record.number, command)
                    self._note_ready()
                self._events.settled()
            case Silence():
                with self._changed:
                    record.record_silence(message)
                    self._changed.notify_all()
                if message.detail:
                    log.warning("replica %d: %s", record.number, message.detail)
                else:
                    self._events.settled()
            case Failed():
                # Keep the first failure: other processes may fail because of it before they are ended.
                record.failure = record.failure or from_wire(message.kind, message.arguments)
            case _:
                assert_never(message)

    def _note_ready(self) -> None:
        self.started |= all(record.state == "ready" for record in self.records)
        if self.started:
            infos = [record.info for record in self.records if record.info is not None]
            self.info = msgspec.structs.replace(combine_infos(infos), model_id=self._model_id)
        self._changed.notify_all()

    def _die(self, record: ReplicaRecord, replica: Replica, reason: str, *, by_request: bool = False) -> None:
        """Report the death, and restart the replica unless it has been restarted too often."""
        with self._changed:
            if self._closed or replica is not record.replica:
                return
            started = record.state != "starting"
            again = record.record_death(reason, by_request=by_request)
            detail = record.detail
            self._changed.notify_all()
        if started:
            log.error("replica %d ended: %s", record.number, reason)
        try:
            self._events.lost(record.number, detail)
        finally:
            while again:
                again = self._begin_again(record)
            self._events.settled()

    def _begin_again(self, record: ReplicaRecord) -> bool:
        """Restart the replica after a pause; return True if that failed and has to be tried again."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, record.pause())
        try:
            self._begin(record)
            return False
        except Exception as error:
            log.exception("replica %d cannot be restarted", record.number)
            reason = f"{type(error).__name__}: {error}"
            with self._changed:
                begun, again = record.replica, not self._closed and record.record_death(reason)
                self._changed.notify_all()
        if begun is not None:
            begun.close()
        return again


def _make_replica(config: EngineConfig, *, in_process: bool) -> MakeReplica:
    """Return the constructor of replicas: of threads, of processes, or of Ray actors."""
    if config.ray is None:
        return ThreadReplica if in_process else ProcessReplica
    if in_process:
        raise InvalidField("ray", config.ray, "none within one process")
    if find_spec("ray") is None:
        raise InvalidField("ray", config.ray, "only if Ray is installed: pip install 'tok-server[ray]'")
    # Else Ray copies a project that runs under `uv run` to all hosts and runs it there. Ray reads this when imported.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from tok_core.replicas.ray_replica import RayReplica

    return partial(RayReplica, model=config.model)


def failures(failed: list[tuple[int, str]]) -> Progress:
    """Return a report that contains only failed requests and the reasons."""
    rids, floats = np.empty(0, np.int64), np.empty(0, np.float32)
    columns = rids, EMPTY, EMPTY, floats, EMPTY.reshape(0, 0), floats.reshape(0, 0)
    return Progress(*columns, [], [], [], [], [], Stats(), failed)
