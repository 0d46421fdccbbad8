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

from tok_core.errors import InvalidField
from tok_core.mesh import RankCoordinates, Rendezvous

_TIMEOUT = timedelta(minutes=30)  # the manager's own watch over steps ends a stuck replica long before


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Groups of torch.distributed; None where a worker would be alone in one.

    tensor   the ranks of this worker's stage, in order
    before   this worker and its like of the stage before, which is rank 0 of the two
    after    this worker and its like of the stage after, which is rank 1 of the two
    draws    the workers of this rank in all stages, in order
    """

    place: RankCoordinates
    device: torch.device
    tensor: dist.ProcessGroup | None = None
    before: dist.ProcessGroup | None = None
    after: dist.ProcessGroup | None = None
    draws: dist.ProcessGroup | None = None

    def least(self, value: int) -> int:
        """The smallest of all workers' values; called by all of them at the same point. Waits for the others."""
        if self.place.workers == 1:
            return value
        least = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def of_first(self, value: int) -> int:
        """Worker 0's value, for all; called by all of them at the same point. Waits for the others."""
        if self.place.workers == 1:
            return value
        shared = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.broadcast(shared, 0)
        return int(shared)


def join(place: RankCoordinates, rendezvous: Path | Rendezvous | None, device: torch.device) -> ProcessGroups:
    """Meets the other workers at `rendezvous`, a file or a host, by NCCL on CUDA devices and gloo on CPUs.

    A worker alone needs none. Raises InvalidField where one of several has none.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.workers == 1:
        return ProcessGroups(place, device)
    if rendezvous is None:
        field = "tp" if place.ranks > 1 else "pp"
        raise InvalidField(field, place.ranks if place.ranks > 1 else place.stages, "1 within one process")
    # Each link between two stages has a group of its own, which carries one direction.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if device.type != "cuda" and isinstance(rendezvous, Path):  # all are on this host
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # its own choice of an interface may lead nowhere
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_store(place, rendezvous),
        rank=place.number,
        world_size=place.workers,
        timeout=_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    stages, ranks = range(place.stages), range(place.ranks)
    number = [[stage * place.ranks + rank for rank in ranks] for stage in stages]
    tensor = _own([number[stage] for stage in stages])
    draws = _own([[number[stage][rank] for stage in stages] for rank in ranks], _waiting(device, blocks=1))
    pairs = [[[number[stage][rank], number[stage + 1][rank]] for rank in ranks] for stage in stages[:-1]]
    links = [_own(pair, _waiting(device, blocks=4)) for pair in pairs]
    before = links[place.stage - 1] if place.stage > 0 else None
    after = links[place.stage] if place.stage < place.stages - 1 else None
    return ProcessGroups(place, device, tensor, before, after, draws)


def _store(place: RankCoordinates, rendezvous: Path | Rendezvous) -> Store:
    """What the workers know of each other before they are joined."""
    store: Store
    if isinstance(rendezvous, Path):
        store = FileStore(str(rendezvous), place.workers)
    else:
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            place.workers,
            is_master=place.number == 0,
            timeout=_TIMEOUT,  # to connect
            wait_for_workers=False,
            master_listen_fd=rendezvous.listener,
        )
    store.set_timeout(_TIMEOUT)
    return store


def _waiting(device: torch.device, blocks: int) -> object:
    """Options of a group whose kernels mostly wait, and should occupy little of a GPU meanwhile."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = blocks
    options._timeout = _TIMEOUT
    return options


def _own(groups: list[list[int]], options: object = None) -> dist.ProcessGroup | None:
    """Makes every group, as each worker must, and returns the one that this worker is in."""
    own = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=_TIMEOUT, pg_options=options)
            own = group if dist.get_rank() in ranks else own
    return own
