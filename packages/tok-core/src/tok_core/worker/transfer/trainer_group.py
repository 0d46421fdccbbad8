"""Join a trainer's process group, receive its broadcasts, and detect its end."""

from __future__ import annotations

import io
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tok_core.errors import ModelError
from tok_core.messages import JoinGroup
from tok_core.runtime import HEARTBEAT

TIMEOUT = timedelta(minutes=5)  # without progress, for the join and for each broadcast
HANDSHAKE_TIMEOUT = timedelta(seconds=10)  # until the store answers; the engine has reached its port before
TRAINER_CHECK_SECONDS = 1.0  # between checks whether the trainer lives
POLL_SECONDS = 0.05  # between turns of the main loop while it waits
UNIQUE_ID_KEY = "broadcast_from/0/0"  # key of vLLM's store that holds NCCL's id
UNIQUE_ID_BYTES = 128
NCCL_KEY = "0"  # key under which ProcessGroupNCCL looks for the id of its first communicator


class TrainerGroup:
    """A worker's membership in a process group in which the trainer is rank 0.

    A group whose trainer has ended, or in which a broadcast failed, is closed and can only be left.

    number  the worker's number in its replica
    """

    def __init__(self, task: JoinGroup, number: int, device: torch.device) -> None:
        self.device = device
        self.lost = threading.Event()
        self._timeout, self._fault = HANDSHAKE_TIMEOUT, "no progress"  # what errors say after `_timeout`
        self._backend: Any = None  # a ProcessGroupGloo or ProcessGroupNCCL, whose methods torch's stubs lack
        try:
            self.run(lambda: self._join(task, task.rank_offset + number))
        except ModelError as error:
            self.close()
            raise ModelError(f"group {task.name!r} at {task.address}:{task.port}: {error}") from error

    @property
    def is_open(self) -> bool:
        """Return whether the group is not closed and its trainer lives."""
        return self._backend is not None and not self.lost.is_set()

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread while the main loop counts turns; close the group and raise ModelError if it fails."""
        errors: list[BaseException] = []
        self._progress = time.monotonic()

        def body() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body, name="trainer-group", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            HEARTBEAT.turned()
            if thread.is_alive() and (self._is_stuck() or self.lost.is_set()):
                reason = "the trainer has ended" if self.lost.is_set() else f"{self._fault} within {self._timeout}"
                self.close()  # sets `lost`
                raise ModelError(reason)
        if errors:
            self.close()
            if not isinstance(errors[0], RuntimeError | OSError | ValueError | pickle.UnpicklingError):
                raise errors[0]
            reason = f"the trainer cannot be reached: {errors[0]}"
            if self._is_stuck():  # gloo waits for the same time
                reason = f"{self._fault} within {self._timeout}"
            raise ModelError(reason) from errors[0]

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._progress > self._timeout.total_seconds()

    def broadcast(self, tensor: Tensor) -> None:
        """Receive a tensor that the trainer broadcasts; only within `run`."""
        assert self._backend is not None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._backend.broadcast([tensor], options)
        self._wait(work)

    def close(self) -> None:
        """Leave the group, so that other members' broadcasts fail instead of waiting for this worker."""
        backend, self._backend = self._backend, None
        self.lost.set()
        if backend is not None:
            with suppress(RuntimeError):
                backend.abort()

    def _join(self, task: JoinGroup, rank: int) -> None:
        # First, since the other store waits for all members of the group.
        watched = TCPStore(task.address, task.port, None, False, HANDSHAKE_TIMEOUT, wait_for_workers=False)
        threading.Thread(target=_watch, args=(watched, self.lost), name="trainer-watch", daemon=True).start()
        self._timeout, self._progress = TIMEOUT, time.monotonic()
        self._fault = f"not all ranks have joined (world_size is {task.world_size}; is the trainer's the same?)"
        store = TCPStore(task.address, task.port, task.world_size, False, TIMEOUT)
        if self.device.type != "cuda":
            keys = PrefixStore("cpu/", PrefixStore(f"{task.name}/", PrefixStore(task.name, store)))
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(task.address, task.port))]
            options._timeout = TIMEOUT
            self._backend = dist.ProcessGroupGloo(keys, rank, task.world_size, options)
        elif task.protocol == "vllm":
            id_store = HashStore()
            id_store.set(NCCL_KEY, read_unique_id(store.get(UNIQUE_ID_KEY)))  # type: ignore[arg-type]
            self._store = store  # kept open: the trainer's server counts its clients
            self._backend = _nccl(id_store, rank, task.world_size)
            self._wait(self._backend.allreduce([torch.zeros(1, device=self.device)]))
        else:
            keys = PrefixStore("cuda/", PrefixStore(f"{task.name}/", PrefixStore(task.name, store)))
            self._backend = _nccl(keys, rank, task.world_size)
        self._fault = "no progress"

    def _wait(self, work: dist.Work) -> None:
        if self.device.type == "cuda":
            while not work.is_completed():
                if self.lost.is_set():
                    raise RuntimeError("the trainer has ended")
                time.sleep(0.001)
        work.wait()
        self._progress = time.monotonic()


def _nccl(store: Store, rank: int, size: int) -> dist.ProcessGroupNCCL:
    """Return an NCCL group whose failures are reported by `TrainerGroup` alone.

    torch's watchdog would end the process, and its monitor would log an error every second once the trainer's store is
    gone, since it looks there for a request to dump its records.
    """
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0"):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables within this context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _own_address(address: str, port: int) -> str:
    """Return this host's address in the trainer's network: gloo would choose the host name's."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _watch(store: Store, lost: threading.Event) -> None:
    """Set `lost` once the trainer's store does not answer."""
    while not lost.wait(TRAINER_CHECK_SECONDS):
        try:
            store.check(["alive"])
        except RuntimeError:
            lost.set()


class _UniqueIdUnpickler(pickle.Unpickler):
    """Unpickler of ctypes' pickle of a structure named ncclUniqueId, as bytes; refuses everything else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("_ctypes", "_unpickle"):
            return lambda _, state: bytes(state[1])
        if name == "ncclUniqueId":
            return bytes
        raise pickle.UnpicklingError(f"{module}.{name} is not part of NCCL's id")


def read_unique_id(data: bytes) -> bytes:
    """Return NCCL's id from vLLM's pickle of it. Raise UnpicklingError for any other pickle."""
    try:
        unique_id = _UniqueIdUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # malformed pickles raise anything
        raise pickle.UnpicklingError(f"not NCCL's id: {error!r}") from error
    if not isinstance(unique_id, bytes) or len(unique_id) != UNIQUE_ID_BYTES:
        raise pickle.UnpicklingError(f"not NCCL's id of {UNIQUE_ID_BYTES} bytes")
    return unique_id
