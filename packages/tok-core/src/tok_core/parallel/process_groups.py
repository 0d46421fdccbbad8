"""Process groups that connect one worker to the other ranks of its replica."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tok_core.config import RankCoordinates
from tok_core.errors import InvalidField
from tok_core.messages import Rendezvous

_TIMEOUT = timedelta(minutes=30)  # the manager's watchdog ends a stuck replica much earlier


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Process groups of torch.distributed; None for a group that would have only this worker.

    tensor       tensor-parallel group: the ranks of this worker's stage, in order
    before       the worker of the same rank in the stage before (rank 0) and this worker (rank 1)
    after        this worker (rank 0) and the worker of the same rank in the stage after (rank 1)
    token_group  the workers of the same rank in all stages, in order, for sampled tokens
    """

    coordinates: RankCoordinates
    device: torch.device
    tensor: dist.ProcessGroup | None = None
    before: dist.ProcessGroup | None = None
    after: dist.ProcessGroup | None = None
    token_group: dist.ProcessGroup | None = None

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of all workers' values. All workers call this at the same point; it waits for them."""
        if self.coordinates.workers == 1:
            return value
        lowest = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        return int(lowest)

    def all_reduce_sum(self, *values: int) -> tuple[int, ...]:
        """Return the sums of all workers' values. All workers call this at the same point; it waits for them."""
        if self.coordinates.workers == 1:
            return values
        sums = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(sums)
        return tuple(sums.tolist())

    def broadcast_from_first(self, value: int) -> int:
        """Return worker 0's value. All workers call this at the same point; it waits for the others."""
        if self.coordinates.workers == 1:
            return value
        shared = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.broadcast(shared, 0)
        return int(shared)


def join(coordinates: RankCoordinates, rendezvous: Path | Rendezvous | None, device: torch.device) -> ProcessGroups:
    """Create the process groups of a worker, by NCCL on CUDA devices and gloo on CPUs.

    Workers meet at `rendezvous`, a file or a host; a single worker needs none. Raises InvalidField if there are
    several workers and no rendezvous.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if coordinates.workers == 1:
        return ProcessGroups(coordinates, device)
    if rendezvous is None:
        field, degree = ("tp", coordinates.ranks) if coordinates.ranks > 1 else ("pp", coordinates.stages)
        raise InvalidField(field, degree, "1 within one process")
    # torch warns that a group serialises its P2P transfers; here a group links two stages in one direction only.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if device.type != "cuda" and isinstance(rendezvous, Path):  # all are on this host
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the interface that gloo chooses may not be reachable
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_store(coordinates, rendezvous),
        rank=coordinates.number,
        world_size=coordinates.workers,
        timeout=_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    stages, ranks = range(coordinates.stages), range(coordinates.ranks)
    number = [[stage * coordinates.ranks + rank for rank in ranks] for stage in stages]
    tensor = _new_groups([number[stage] for stage in stages])
    token_group = _new_groups([[number[stage][rank] for stage in stages] for rank in ranks], _options(device, blocks=1))
    pairs = [[[number[stage][rank], number[stage + 1][rank]] for rank in ranks] for stage in stages[:-1]]
    links = [_new_groups(pair, _options(device, blocks=4)) for pair in pairs]
    before = links[coordinates.stage - 1] if coordinates.stage > 0 else None
    after = links[coordinates.stage] if coordinates.stage < coordinates.stages - 1 else None
    return ProcessGroups(coordinates, device, tensor, before, after, token_group)


def _store(coordinates: RankCoordinates, rendezvous: Path | Rendezvous) -> Store:
    """Return the key-value store through which workers find each other."""
    store: Store
    if isinstance(rendezvous, Path):
        store = FileStore(str(rendezvous), coordinates.workers)
    else:
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            coordinates.workers,
            is_master=coordinates.number == 0,
            timeout=_TIMEOUT,  # to connect
            wait_for_workers=False,
            master_listen_fd=rendezvous.listener,
        )
    store.set_timeout(_TIMEOUT)
    return store


def _options(device: torch.device, blocks: int) -> object:
    """Return NCCL options for a group whose kernels mostly wait: high priority, and at most `blocks` thread blocks."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = blocks
    options._timeout = _TIMEOUT
    return options


def _new_groups(groups: list[list[int]], options: object = None) -> dist.ProcessGroup | None:
    """Create all groups, as every worker must, and return the group that contains this worker."""
    own = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=_TIMEOUT, pg_options=options)
            own = group if dist.get_rank() in ranks else own
    return own
