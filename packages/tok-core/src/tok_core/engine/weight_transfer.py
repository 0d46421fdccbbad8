"""Update weights by a trainer's tensors: join its process groups, stage its tensors, apply all of them or none."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from tok_core.errors import Amount, EngineClosed, EngineDead, InvalidField, ModelError
from tok_core.messages import (
    TENSOR_DTYPES,
    CheckStaged,
    DropStaged,
    GroupProtocol,
    IpcHandle,
    JoinGroup,
    LeaveGroup,
    ReceiveTensors,
    TransferTask,
    WorkerTask,
)

if TYPE_CHECKING:
    from tok_core.engine.control import EngineControl

log = logging.getLogger("tok_core")

JOIN_TIMEOUT_SECONDS = 300.0  # until the trainer's store must be reachable
JOIN_WARNING_SECONDS = 10.0  # for which workers wait for the group's other members before the log says so
MAX_PORT, MAX_SIZE = (1 << 16) - 1, (1 << 63) - 1
MAX_RANKS = 1 << 16  # of a group: torch allocates tables of this size, and takes no number beyond 32 bits
MAX_ELEMENTS = 1 << 59  # of all tensors of a call: torch counts their bytes as 64-bit integers
CONNECT_TIMEOUT_SECONDS, RETRY_SECONDS = 5.0, 0.2

VLLM_GROUP = "weight_transfer"  # name of the group that vLLM's protocol has

TaskOf = Callable[[int], WorkerTask]
"""The task of a replica, by its number."""


class WeightTransfer:
    """Thread-safe updates of all replicas' weights by a trainer's tensors: all of them, or none.

    Workers check and stage received tensors; no weight changes until they are applied. There are three ways:

    - `start`, `receive` (repeated), `finish`: `finish` applies all tensors of the session.
    - `receive` without `start`: its tensors are applied at once.
    - `receive(…, hold=True)` without `start`, while the engine is paused: tensors are applied once all of the model's
      have been received, or else when the engine resumes.

    Each method blocks until it is done.
    """

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self._session: Literal["open", "failed", "held"] | None = None
        self._version: str | None = None
        self._received = False
        self._deaths = 0  # replica deaths before the update
        self.groups: dict[str, int] = {}  # default `bucket_bytes` of each joined group

    def join(
        self,
        address: str,
        port: int,
        *,
        rank_offset: int,
        world_size: int,
        name: str = VLLM_GROUP,
        protocol: GroupProtocol = "torch",
        bucket_bytes: int = 0,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Join a group of a trainer, which is rank 0 and serves a TCPStore at `address` and `port`.

        rank_offset  rank of the first worker; worker w of replica r has the rank `rank_offset + r * tp * pp + w`
        world_size   all ranks of the group; several engines may be in it
        protocol     "torch": a process group as made by SGLang's init_custom_process_group, with NCCL on GPUs and gloo
                     on CPUs. "vllm": NCCL's id in the store, and a one-element all-reduce; on CPUs the same as "torch"
        bucket_bytes default of `receive`
        cancelled    ends the wait for the trainer's store when it is set

        Requests run until the trainer's store can be reached; then workers wait for the other members of the group.

        Raises ModelError if the trainer is not reached within 5 minutes, or if the wait is cancelled, and EngineClosed
        if the engine is closed meanwhile.
        """
        _require_types(str, name=name, address=address)
        _require_types(int, port=port, rank_offset=rank_offset, world_size=world_size, bucket_bytes=bucket_bytes)
        if not 1 <= port <= MAX_PORT:
            raise InvalidField("port", port, f"integers from 1 to {MAX_PORT}")
        if world_size > MAX_RANKS:
            raise InvalidField("world_size", world_size, f"at most {MAX_RANKS}")
        if protocol not in get_args(GroupProtocol):
            raise InvalidField("protocol", protocol, ", ".join(get_args(GroupProtocol)))
        place = f"group {name!r} at {address}:{port}"

        def check_wait() -> None:
            if self._control.closed:
                raise EngineClosed("the engine was closed")
            if cancelled is not None and cancelled.is_set():
                raise ModelError(f"{place}: the wait for the trainer was cancelled")

        with self._control.operation:
            self._replica_workers(rank_offset, world_size)
        try:
            _wait_for_store(address, port, check_wait)
        except (OSError, UnicodeError) as failure:  # UnicodeError: the address cannot be a host's name
            raise ModelError(f"{place}: the trainer cannot be reached: {failure}") from failure
        with self._control.operation:
            check_wait()
            size = self._replica_workers(rank_offset, world_size)
            if name in self.groups and self._session is not None:
                log.warning("a new trainer joins %s: the update that was not finished is dropped", place)
                self._drop()

            def task(replica: int) -> TransferTask:
                return JoinGroup(name, address, port, rank_offset + replica * size, world_size, protocol)

            message = "%s: waits for all ranks (world_size is %d); no request is computed meanwhile"
            warning = threading.Timer(JOIN_WARNING_SECONDS, log.warning, (message, place, world_size))
            warning.daemon = True
            warning.start()
            try:
                for error in self._control.execute(task):
                    self._control.execute(lambda _: LeaveGroup(name))
                    raise error
            finally:
                warning.cancel()
            self.groups[name] = bucket_bytes

    def _replica_workers(self, rank_offset: int, world_size: int) -> int:
        """Return the number of workers of a replica. Raise an error if all replicas' workers cannot join a group."""
        running, configured, size = self._control.workers()
        if running < configured:
            raise EngineDead(f"{configured - running} of {configured} replicas do not run; a group needs all")
        if rank_offset < 1:
            raise InvalidField("rank_offset", rank_offset, "at least 1; the trainer is rank 0")
        if world_size < rank_offset + configured * size:
            raise InvalidField("world_size", world_size, f"at least rank_offset + {configured * size} workers")
        return size

    def leave(self, name: str = VLLM_GROUP) -> None:
        """Leave a group."""
        with self._control.operation:
            self._require_group(name)
            del self.groups[name]
            self._control.execute(lambda _: LeaveGroup(name))

    def start(self) -> None:
        """Open a session: tensors received from now on are applied by `finish`.

        Drops the tensors of an unfinished session, with a warning: its trainer may have ended.
        """
        with self._control.operation:
            if self._received:
                log.warning("a new weight update drops the tensors received for one that was not finished")
            self._drop()
            self._session = "open"

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str = VLLM_GROUP,
        bucket_bytes: int | None = None,
        handles: Sequence[Mapping[str, IpcHandle]] | None = None,
        version: str | None = None,
        hold: bool = False,
    ) -> None:
        """Receive tensors in a group, or from memory of a process on the same GPUs, and stage or apply them.

        bucket_bytes  see `ReceiveTensors`; None: the group's default
        handles       made by `tok_core.worker.transfer.export_tensors`; None: the trainer broadcasts in `group`
        version       version of the weights once the tensors are applied; None: the number of the update

        Raises ModelError if a tensor does not fit, which it names, or if the trainer ends. Then no weight changes, and
        the session has failed.
        """
        with self._control.operation:
            try:
                _require_lists(names, dtypes, shapes, handles)
                _require_types(str, group=group)
                _require_types(int, bucket_bytes=bucket_bytes or 0)
                require_version(version)
                if handles is None:
                    self._require_group(group)
            except InvalidField:
                if self._session is not None:
                    self._fail()
                raise
            if self._session is None and hold and self._control.paused:
                self._session = "held"
            at_once = self._session is None
            self._version = version or self._version
            if not self._received:
                self._deaths = self._control.deaths
            task = ReceiveTensors(
                list(names),
                list(dtypes),
                [list(shape) for shape in shapes],
                "" if handles is not None else group,
                self.groups.get(group, 0) if bucket_bytes is None else bucket_bytes,
                None if handles is None else [dict(by_gpu) for by_gpu in handles],
                map_only=at_once,
            )
            self._stage(task)
            if at_once or (self._session == "held" and self._holds_all_tensors()):
                self._apply()

    def finish(self, version: str | None = None) -> None:
        """Apply the session's tensors, in all replicas or none. Raise ModelError if the session has failed.

        Without tensors, the weights stay, and get the version if one is given.
        """
        require_version(version)
        with self._control.operation:
            session, self._session = self._session, None
            if session is None:
                raise InvalidField("finish", "no open update", "a call after start")
            if session == "failed":
                if self._received:
                    self._drop()
                raise ModelError("the update has failed; the weights are the old ones")
            if self._received:
                self._version = version or self._version
                self._apply()
            elif version is not None:
                self._control.rename_weights(version)

    def finish_held(self) -> None:
        """Apply tensors that were held; the engine calls this when it resumes."""
        if self._session == "held":
            self.finish()

    def supersede(self) -> None:
        """Drop the tensors received, since newer weights have been loaded from a directory."""
        if self._received:
            log.warning("the weights of a directory replace the tensors received for an update that was not finished")
            self._fail()

    def _require_group(self, name: str) -> None:
        """Raise InvalidField if no group of this name was joined."""
        if name not in self.groups:
            raise InvalidField("group_name", name, ", ".join(sorted(self.groups)) or "none: no group was joined")

    def _stage(self, task: ReceiveTensors) -> None:
        """Receive tensors in all workers. If one of them fails, drop what was received, fail the session, and raise."""
        for error in self._control.execute(lambda _: task):
            self._fail()
            raise error
        self._received = True

    def _fail(self) -> None:
        """Drop the tensors received. A session that was opened stays until `finish`, which then raises ModelError."""
        was_open = self._session in ("open", "failed")
        self._drop()
        self._session = "failed" if was_open else None

    def _holds_all_tensors(self) -> bool:
        """Return whether the tensors received so far are all those of the model."""
        return not self._control.execute(lambda _: CheckStaged(True))

    def _apply(self) -> None:
        """Apply the tensors received, in all replicas or none, and end the session."""
        version, self._version = self._version, None
        self._session, self._received = None, False
        for error in self._control.execute(lambda _: CheckStaged(self._control.needs_all_tensors)):
            self._drop()
            raise error
        try:
            self._control.apply_staged(version, self._deaths)
        except (ModelError, InvalidField):
            self._drop()
            raise

    def _drop(self) -> None:
        """Drop the tensors received, and end the session."""
        self._session, self._version, self._received = None, None, False
        self._control.execute(lambda _: DropStaged())


def _require_lists(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    handles: Sequence[Mapping[str, IpcHandle]] | None,
) -> None:
    """Raise InvalidField unless the lists describe tensors: one entry for each name, with known dtypes and shapes."""
    for name in names:
        _require_types(str, names=name)
    if not names or len(set(names)) < len(names):
        raise InvalidField(
            "names", f"{len(names)} names, {len(set(names))} of them different", "one or more, all different"
        )
    for field, entries in (("dtypes", dtypes), ("shapes", shapes), ("handles", handles)):
        if entries is not None and len(entries) != len(names):
            raise InvalidField(field, f"{len(entries)} entries", f"{len(names)}, as many as names")
    for dtype in dtypes:
        if dtype not in TENSOR_DTYPES:
            raise InvalidField("dtypes", dtype, ", ".join(TENSOR_DTYPES))
    for shape in shapes:
        if any(type(size) is not int or not 0 <= size <= MAX_SIZE for size in shape):
            raise InvalidField("shapes", list(shape), f"integers from 0 to {MAX_SIZE}")
    if (elements := sum(map(math.prod, shapes))) > MAX_ELEMENTS:
        raise InvalidField("shapes", Amount(f"{elements} elements"), f"at most {MAX_ELEMENTS}")


def require_version(version: object) -> None:
    """Raise InvalidField unless `version` is None or a text of at least one character."""
    if version is not None and (type(version) is not str or not version):
        raise InvalidField("version", version, "text of at least one character, or None for the number of the update")


def _require_types(kind: type[str] | type[int], **fields: object) -> None:
    """Raise InvalidField for the first field that is not of this type: manager and workers could not decode it."""
    for field, value in fields.items():
        if type(value) is not kind:
            raise InvalidField(field, value, "text" if kind is str else "an integer")


def _wait_for_store(address: str, port: int, check_wait: Callable[[], None]) -> None:
    """Wait until the trainer's store accepts connections. Raise OSError for an unknown host, or when time is up.

    `check_wait` raises an error that ends the wait.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
    while True:
        check_wait()
        try:
            socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_SECONDS).close()
            return
        except socket.gaierror:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)
