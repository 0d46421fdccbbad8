"""Messages that change a running replica: the engine's commands to its manager, the manager's tasks for workers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import msgspec

CommandAction = Literal[
    "pause",
    "retract",
    "resume",
    "clear_cache",
    "check_weights",
    "load_weights",
    "transfer",
    "rebalance",
    "sleep",
    "wake_up",
]
MemoryTag = Literal["weights", "kv_cache"]
TENSOR_DTYPES = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "int64": "I64",
        "int32": "I32",
        "int8": "I8",
        "uint8": "U8",
    }
)  # dtypes of tensors that trainers send: torch's names, and those of safetensors
GroupProtocol = Literal["vllm", "torch"]


class JoinGroup(msgspec.Struct, tag=True, frozen=True):
    """Join a group in which a trainer, rank 0, broadcasts weights. The trainer's TCPStore is at `address` and `port`.

    rank_offset  rank of the replica's first worker
    protocol     "vllm": NCCL's id is in the store, and a one-element all-reduce follows. "torch": a process group of
                 torch.distributed whose keys start with `name`. On a CPU both are "torch", with gloo
    """

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    protocol: GroupProtocol


class LeaveGroup(msgspec.Struct, tag=True, frozen=True):
    """Leave the group `name`; without effect if the worker is in no such group."""

    name: str


class IpcHandle(msgspec.Struct, frozen=True):
    """Memory of another process on the same GPU: an allocation's CUDA IPC handle, and an offset within it in bytes."""

    handle: bytes
    offset: int


class ReceiveTensors(msgspec.Struct, tag=True, frozen=True):
    """Receive tensors, check them, and stage the part of each that the worker needs; no weight changes.

    dtypes        names such as "bfloat16"
    group         group in which the trainer broadcasts; "": the tensors are in `handles`
    bucket_bytes  a broadcast holds tensors concatenated as bytes, until they exceed this size; 0: one broadcast for
                  each tensor
    handles       CUDA IPC handles of each tensor, by the UUID of the GPU
    map_only      do not copy the memory of `handles`, since `ApplyStaged` follows before the trainer may change it
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group: str = ""
    bucket_bytes: int = 0
    handles: list[dict[str, IpcHandle]] | None = None
    map_only: bool = False


class CheckStaged(msgspec.Struct, tag=True, frozen=True):
    """Check whether the staged tensors can be applied. `complete`: they must be all tensors of the model."""

    complete: bool


class ApplyStaged(msgspec.Struct, tag=True, frozen=True):
    """Write the staged tensors into the parameters, and drop them; an error ends the worker."""


class DropStaged(msgspec.Struct, tag=True, frozen=True):
    """Drop the staged tensors."""


TransferTask = JoinGroup | LeaveGroup | ReceiveTensors | CheckStaged | ApplyStaged | DropStaged


class CommandResult(msgspec.Struct, tag=True, frozen=True):
    """Answer to the command `number`. `error`: why it failed; "": it succeeded."""

    number: int
    error: str = ""


class WeightsTask(msgspec.Struct, tag=True, frozen=True):
    """Check the weights in a directory (None: the initial weights), or load them in place. No step is in flight.

    write  True: load them; an error ends the worker. False: only check them
    """

    weights: str | None
    write: bool


class MemoryTask(msgspec.Struct, tag=True, frozen=True):
    """Release the memory of `tags`, or restore it. `keep`: keep a copy of released weights in the host's memory."""

    action: Literal["sleep", "wake_up"]
    tags: tuple[MemoryTag, ...]
    keep: bool


class RebalanceExperts(msgspec.Struct, tag=True, frozen=True):
    """Place experts anew by the tokens that they had since the last such task. Sent while no step is in flight."""


WorkerTask = WeightsTask | TransferTask | MemoryTask | RebalanceExperts


class EngineCommand(msgspec.Struct, tag=True, frozen=True):
    """A command, executed after all messages before it; the manager answers with a `CommandResult` of its number.

    pause          launch no further step; the answer follows once no step is in flight
    retract        preempt all running sequences: they compute their KV cache again after a resume. Only after a pause
    resume         launch steps again
    clear_cache    let requests that start from now on share no page that is cached now
    check_weights  check whether `weights` can be loaded; nothing changes
    load_weights   load `weights` into the parameters, and clear the cache. A failure ends the replica
    transfer       let all workers execute `task`
    rebalance      let all workers place experts anew; the manager commands this to itself
    sleep          launch no further step until all memory is restored, and release the memory of the task's tags. If
                   the KV cache is released, running sequences are preempted and all cached pages are evicted
    wake_up        restore the memory of the task's tags

    weights  directory of a checkpoint; None: the initial weights
    task     task of the actions "transfer", "sleep" and "wake_up"
    """

    number: int
    action: CommandAction
    weights: str | None = None
    task: WorkerTask | None = None


class TaskResult(msgspec.Struct, tag=True, frozen=True):
    """A worker's answer to a WorkerTask. `error`: why it failed; "": it succeeded."""

    error: str = ""
