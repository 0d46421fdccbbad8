"""Execute the tasks of a weight transfer: join and leave groups, receive tensors, write them into the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from tok_core.errors import ModelError
from tok_core.messages import JoinGroup, ReceiveTensors
from tok_core.models import CausalLM, IncomingWeights
from tok_core.runtime import HEARTBEAT
from tok_core.worker.transfer.cuda_ipc import gpu_uuid, mapped
from tok_core.worker.transfer.trainer_group import TrainerGroup


class WeightReceiver:
    """Receiver of a trainer's tensors in one worker: its groups, and the tensors that it has staged.

    number  the worker's number in its replica
    """

    def __init__(self, model: CausalLM, number: int) -> None:
        self._model = model
        self._number = number
        self._device = model.cos_sin_LD.device
        self._groups: dict[str, TrainerGroup] = {}
        self._used: set[str] = set()  # groups that staged tensors came from
        self._mapping = ExitStack()
        self._staging: IncomingWeights | None = None

    def join(self, task: JoinGroup) -> None:
        """Join a group, in place of one of the same name. Free the connections of groups whose trainers have ended."""
        self.leave(task.name)
        for group in self._groups.values():
            if not group.is_open:
                group.close()
        self._groups[task.name] = TrainerGroup(task, self._number, self._device)

    def leave(self, name: str) -> None:
        """Leave a group."""
        if (group := self._groups.pop(name, None)) is not None:
            group.close()

    def receive(self, task: ReceiveTensors) -> None:
        """Receive and stage tensors. If any does not fit, drop all staged tensors and raise ModelError.

        Broadcasts of tensors that do not fit are received nevertheless: else the trainer's collective would hang.
        """
        try:
            if task.handles is None:
                self._receive_group(task)
            else:
                self._incoming.check_metadata(task.names, task.dtypes, task.shapes)
                self._map(task)
        except (ModelError, RuntimeError) as error:
            self.drop()
            raise ModelError(str(error)) from error

    def check(self, *, complete: bool) -> None:
        """Raise ModelError if the staged tensors cannot be applied; see `IncomingWeights.check`."""
        for name in self._used:
            if name in self._groups and not self._groups[name].is_open:
                raise ModelError(f"the trainer of group {name!r} has ended")
        self._incoming.check(complete=complete)

    def apply(self) -> None:
        """Write the staged tensors into the model, and drop them."""
        self._incoming.apply()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.drop()

    def drop(self) -> None:
        """Drop the staged tensors, and release their device memory."""
        self._staging = None
        self._used.clear()
        self._mapping.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _incoming(self) -> IncomingWeights:
        if self._staging is None:
            self._staging = IncomingWeights(self._model)
        return self._staging

    def _receive_group(self, task: ReceiveTensors) -> None:
        group = self._groups.get(task.group)
        if group is None:
            raise ModelError(f"this worker is in no group {task.group!r}")
        if not group.is_open:
            raise ModelError(f"group {task.group!r} is closed, since its trainer has ended or a broadcast has failed")
        self._used.add(task.group)
        errors: list[ModelError] = []
        try:
            self._incoming.check_metadata(task.names, task.dtypes, task.shapes)
        except ModelError as error:
            errors.append(error)

        def work() -> None:
            for bucket in buckets(task):
                for name, tensor in self._broadcast(group, bucket, packed=task.bucket_bytes > 0):
                    if errors:
                        break
                    try:
                        self._incoming.stage(name, tensor, copy=True)
                    except ModelError as error:
                        errors.append(error)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()  # copies to the host read the bucket

        try:
            group.run(work)
        except ModelError as error:
            errors.append(error)
        if errors:
            raise ModelError("; ".join(map(str, errors)))

    def _broadcast(
        self, group: TrainerGroup, bucket: list[tuple[str, torch.dtype, list[int]]], *, packed: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive one broadcast, and yield its tensors. `packed`: they are concatenated as bytes."""
        if not packed:
            (name, dtype, shape) = bucket[0]
            tensor = self._empty(shape, dtype)
            group.broadcast(tensor)
            yield name, tensor
            return
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in bucket]
        joined = self._empty([sum(sizes)], torch.uint8)
        group.broadcast(joined)
        for (name, dtype, shape), data in zip(bucket, torch.split(joined, sizes), strict=True):
            yield name, as_tensor(data, dtype, shape)

    def _empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Return memory for a broadcast. Raise ModelError if there is not enough."""
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except RuntimeError as error:
            count = math.prod(shape) * dtype.itemsize
            raise ModelError(f"a broadcast of {count} bytes does not fit in the worker's memory") from error

    def _map(self, task: ReceiveTensors) -> None:
        """Stage tensors from another process's memory on this GPU."""
        if self._device.type != "cuda":
            raise ModelError("this engine runs on a CPU; CUDA IPC handles need a GPU")
        assert task.handles is not None
        uuid = gpu_uuid(self._device)
        with ExitStack() as mapping:
            map_bytes = mapping.enter_context(mapped(self._device))
            for name, dtype_name, shape, handles in zip(
                task.names, task.dtypes, task.shapes, task.handles, strict=True
            ):
                HEARTBEAT.turned()
                if uuid not in handles:
                    raise ModelError(f"tensor {name} has no handle for GPU {uuid}")
                dtype, handle = getattr(torch, dtype_name), handles[uuid]
                data = map_bytes(handle.handle, handle.offset, math.prod(shape) * dtype.itemsize)
                self._incoming.stage(name, as_tensor(data, dtype, shape), copy=not task.map_only)
            if task.map_only:
                self._mapping = mapping.pop_all()


def buckets(task: ReceiveTensors) -> Iterator[list[tuple[str, torch.dtype, list[int]]]]:
    """Yield the tensors of each broadcast. As in vLLM, a bucket ends with the tensor that exceeds the size."""
    bucket, size = [], 0
    for name, dtype_name, shape in zip(task.names, task.dtypes, task.shapes, strict=True):
        dtype: torch.dtype = getattr(torch, dtype_name)
        bucket.append((name, dtype, shape))
        size += math.prod(shape) * dtype.itemsize
        if size > task.bucket_bytes or not task.bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def as_tensor(data: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return bytes as a tensor, copied if they are not aligned."""
    aligned = data.data_ptr() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype).view(shape)
