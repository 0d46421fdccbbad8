"""A trainer in its own process, rank 0 of a gloo group, that broadcasts a model's weights as SGLang's trainers do.

`python -m support.trainer MODEL` shares a model's tensors by CUDA IPC instead; see `share`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

from support.forked_children import ForkedChild
from tok_core.worker.transfer import export_tensors

NEVER = 1 << 30
TIMEOUT = timedelta(minutes=1)


def weights(model: Path) -> dict[str, Tensor]:
    """Return a model's tensors, in the order in which a trainer sends them."""
    found: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        found |= load_file(file)
    return dict(sorted(found.items()))


def update_info(tensors: dict[str, Tensor]) -> dict[str, list[object]]:
    """Return names, dtypes and shapes with vLLM's names of the fields."""
    return {
        "names": list(tensors),
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
    }


def announce(path: Path, change: Callable[[dict[str, Tensor]], object] = lambda _: None) -> dict[str, Any]:
    """Return the arguments of `receive` for a model's tensors, changed."""
    tensors = weights(path)
    change(tensors)
    info = update_info(tensors)
    return {"names": info["names"], "dtypes": info["dtype_names"], "shapes": info["shapes"]}


@contextmanager
def trainer(
    port: int, world_size: int, *models: Path, group: str = "weight_transfer", bucket_bytes: int = 0, stall: int = NEVER
) -> Iterator[ForkedChild]:
    """Run `main` in a forked process, which is killed at the end."""
    arguments = (port, world_size, group, bucket_bytes, stall, *map(str, models))
    code = f"from support.trainer import main; main{arguments}"
    process = ForkedChild([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def sharer(model: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `share` in a process of its own, which is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.trainer", str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def send_line(process: ForkedChild) -> None:
    """Let the trainer broadcast its next model."""
    process.stdin.write(b"\n")
    process.stdin.flush()


def read_line(process: ForkedChild | subprocess.Popen[str]) -> str:
    """Return the next line that the trainer prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def join(port: int, world_size: int, group: str) -> dist.ProcessGroup:
    """Serve a store at `port`, and return the group of gloo once all workers have joined it; leave one of its name."""
    for old in [one for one, name in dist.distributed_c10d._world.pg_names.items() if name == group]:
        dist.destroy_process_group(old)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=TIMEOUT))
    pg: dist.ProcessGroup
    pg, _ = _new_process_group_helper(
        world_size,
        0,
        [],
        Backend("gloo"),
        PrefixStore(group, store),
        group_name=GroupName(group),
        timeout=TIMEOUT,
    )
    dist.distributed_c10d._world.pg_group_ranks[pg] = {rank: rank for rank in range(world_size)}
    return pg


def main(port: int, world_size: int, group: str, bucket_bytes: int, stall: int, *models: str) -> None:
    """Print "joined" when the group is complete; wait for a line of standard input before each model is broadcast.

    stall  number of the broadcast before which the trainer stops for ever
    """
    pg = join(port, world_size, group)
    print("joined", flush=True)
    sent = 0
    for model in models:
        sys.stdin.readline()
        for data in broadcasts(list(weights(Path(model)).values()), bucket_bytes):
            if sent == stall:
                print("stalled", flush=True)
                sys.stdin.read()  # until this process is killed, or the test's
            dist.broadcast(data, 0, group=pg)
            sent += 1
        print("sent", flush=True)
    sys.stdin.readline()


def broadcasts(tensors: list[Tensor], bucket_bytes: int) -> Iterator[Tensor]:
    """Yield what is broadcast: each tensor, or the bytes of several until they exceed a bucket."""
    if not bucket_bytes:
        yield from tensors
        return
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, bucket)) > bucket_bytes:
            yield torch.cat(bucket)
            bucket = []
    if bucket:
        yield torch.cat(bucket)


def share(model: str) -> None:
    """Print the `update_info` of a model's tensors on the GPU, and keep them until standard input ends."""
    tensors = {name: one.cuda() for name, one in weights(Path(model)).items()}
    print(json.dumps(export_tensors(tensors.items())), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    share(sys.argv[1])
