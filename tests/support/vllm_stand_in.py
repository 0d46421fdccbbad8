"""The few names that TRL's clients import from vLLM to send weights, by gloo instead of NCCL.

TRL announces tensors over HTTP and lets vLLM broadcast them. vLLM's trainer serves a TCPStore, joins the workers' group
as rank 0, and broadcasts tensors as joined bytes until they exceed a bucket. This does the same on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from support.serving import free_port
from support.trainer import broadcasts, join

GROUP = "weight_transfer"
BUCKET_BYTES = 1 << 30  # vLLM's default
HOST = "127.0.0.1"


class Communicator:
    """The trainer's place in the group, with the members of vLLM's PyNcclCommunicator that clients touch."""

    def __init__(self, init_info: Mapping[str, Any]) -> None:
        assert init_info["master_address"] == HOST
        self._pg = join(int(init_info["master_port"]), int(init_info["world_size"]), GROUP)
        self.group = SimpleNamespace(store=self._pg, socket=None)  # clients clear both to leave

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcast a tensor to all workers."""
        dist.broadcast(tensor, src, group=self._pg)


def broadcast_packed(
    iterator: Iterator[tuple[str, Tensor]],
    group: Communicator,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
) -> None:
    """Broadcast tensors in buckets, as `packed_nccl_broadcast_producer`."""
    for bucket in broadcasts([post_iter_func(item) for item in iterator], BUCKET_BYTES):
        group.broadcast(bucket, src)


@dataclass
class SendArguments:
    """Arguments of `Engine.trainer_send_weights`, as `NCCLTrainerSendWeightsArgs`."""

    group: Communicator
    packed: bool = False


class Engine:
    """vLLM's `NCCLWeightTransferEngine`, which sends weights in versions before 0.28."""

    trainer_init = Communicator

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: SendArguments) -> None:
        """Broadcast tensors in buckets."""
        assert trainer_args.packed
        broadcast_packed(iterator, trainer_args.group, 0, lambda item: item[1])


def install(monkeypatch: pytest.MonkeyPatch, version: str, *clients: str) -> None:
    """Let TRL find this as vLLM of a version, until the test ends; its modules `clients` are imported anew."""
    imports = import_module("trl.import_utils")
    for name in clients:
        import_module(name)  # without vLLM: their packages import more of it than they need
    contents: dict[str, dict[str, object]] = {
        "vllm": {"__version__": version},
        "vllm.utils.network_utils": {"get_ip": lambda: HOST, "get_open_port": free_port},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": Communicator},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": broadcast_packed},
        "vllm.distributed.weight_transfer.nccl_engine": {
            "NCCLTrainerSendWeightsArgs": SendArguments,
            "NCCLWeightTransferEngine": Engine,
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)

    def is_available(min_version: str | None = None) -> bool:
        return min_version is None or Version(version) >= Version(min_version)

    monkeypatch.setattr(imports, "is_vllm_available", is_available)
    for name in clients:
        monkeypatch.delitem(sys.modules, name)
