"""Run the collectives of a tensor-parallel stage, each by the method that is fastest for its size."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tok_core.parallel.shard_plan import Slice
from tok_kernels.collectives.exchange import DEFAULT_TIMEOUT_SECONDS, Exchange

DEFAULT_ALL_REDUCE_TOKENS = 64  # until `calibrate` measures it
_DEFAULT_EXCHANGE_BYTES = 512 << 10  # until `calibrate` measures it
MAX_TOKENS = 1 << 62  # more than any step has
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class TensorParallel:
    """Tensor-parallel group of a stage: each rank holds a part of every weight matrix.

    max_all_reduce_tokens  largest step, in tokens, that keeps the whole residual stream on every rank
    min_overlap_tokens     smallest step, in tokens, that overlaps its GEMMs with their collectives; precedes
                           `max_all_reduce_tokens`. None: no step does. CUDA only
    max_exchange_bytes     largest tensor, in bytes, whose all-reduce runs through `exchange` instead of
                           torch.distributed
    exchange               shared memory for all-reduces within a kernel; None: devices cannot reach each other's memory
    ordered                for `batch_invariant`: sums add the ranks' values in order of ranks, since a collective's
                           order depends on the size, and every step has the all-reduce layout

    The first three decide which collectives a step consists of: they must be equal on all workers of a replica.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        *,
        ordered: bool = False,
    ) -> None:
        """Connect the ranks. All ranks call this at the same point; it waits for them.

        `timeout_seconds` bounds how long kernels of a rank wait for those of another rank before they trap.
        """
        self.group = group
        self.device = device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.ordered = ordered
        self.max_all_reduce_tokens = MAX_TOKENS if ordered else DEFAULT_ALL_REDUCE_TOKENS
        self.min_overlap_tokens: int | None = None
        self.max_exchange_bytes = 0
        self.exchange: Exchange | None = None
        if device.type == "cuda" and not ordered and _reach_each_other(group, device):
            self._shared, self.exchange = _exchange(group, device, timeout_seconds)
            self.max_exchange_bytes = _DEFAULT_EXCHANGE_BYTES

    @property
    def name(self) -> str:
        """Return the group's name, by which torch's own operations find it."""
        return str(self.group.group_name)

    @property
    def symmetric(self) -> bool:
        """Return whether the ranks can read each other's memory."""
        return self.exchange is not None

    def rows(self, tokens: int) -> int:
        """Return how many rows of the residual stream a rank holds in a step of `tokens`; the same on all ranks."""
        return tokens if self.replicates(tokens) else -(-tokens // self.ranks)

    def overlaps(self, tokens: int) -> bool:
        """Return whether a step of `tokens` overlaps its GEMMs with their collectives."""
        return self.min_overlap_tokens is not None and tokens >= self.min_overlap_tokens

    def replicates(self, tokens: int) -> bool:
        """Return whether every rank holds the whole residual stream in a step of `tokens`."""
        return tokens <= self.max_all_reduce_tokens and not self.overlaps(tokens)

    def exchanges(self, x: Tensor) -> bool:
        """Return whether `sum` uses the exchange for tensors like `x`; depends on size and dtype alone."""
        if self.exchange is None or x.nbytes > self.max_exchange_bytes:
            return False
        from tok_kernels.collectives.triton_all_reduce import can_all_reduce

        return can_all_reduce(x.nbytes, x.dtype)

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """All-reduce the ranks' `x`, contiguous and of one shape; may return `x` itself, changed.

        If `exchanges(x)` is true, a `residual` may be given, equal on all ranks: the sum is added to it in place.
        """
        if self.exchange is not None and self.exchanges(x):
            from tok_kernels.collectives.triton_all_reduce import one_shot_all_reduce

            return one_shot_all_reduce(x, self.exchange.all_reduce, residual)
        assert residual is None, f"a residual of {x.nbytes} bytes is not exchanged"
        if self.ordered:
            return self._ordered_sum(x)
        if x.numel():
            dist.all_reduce(x, group=self.group)
        return x

    def _ordered_sum(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x, dtype=torch.float32)
        for part in self.gather(x):
            total += part
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather every rank's `x`, in order: `[ranks, *x.shape]`."""
        return self.gather_rows(x.contiguous()).view(self.ranks, *x.shape)

    def gather_rows(self, x_SN: Tensor) -> Tensor:
        """All-gather every rank's rows, in order of ranks: `[S, N] -> [ranks × S, N]`."""
        out = x_SN.new_empty((self.ranks * len(x_SN), *x_SN.shape[1:]))
        if out.numel():
            dist.all_gather_into_tensor(out, x_SN, group=self.group)
        return out

    def scatter_sum(self, x_PN: Tensor) -> Tensor:
        """Reduce-scatter: return this rank's rows of the sum of all ranks' `x`, `[ranks × S, N] -> [S, N]`."""
        out = x_PN.new_empty((len(x_PN) // self.ranks, *x_PN.shape[1:]))
        dist.reduce_scatter_tensor(out, x_PN, group=self.group)
        return out

    def reserve(self, tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Allocate the workspace for overlapped GEMMs of up to `tokens`, which otherwise their first use allocates.

        All ranks call this at the same point.
        """
        if self.symmetric:
            from torch.distributed._symmetric_memory import get_symm_mem_workspace

            rows = -(-tokens // self.ranks)
            get_symm_mem_workspace(self.group.group_name, 2 * rows * hidden_size * dtype.itemsize)


class VocabularyShards:
    """Ranks' parts of the vocabulary, for sampling from logits sharded along it; implements `tok_kernels.Shards`."""

    def __init__(self, tensor: TensorParallel, part: Slice) -> None:
        self.rank, self.ranks = tensor.rank, tensor.ranks
        self.first, self.size = part.start, part.size
        self.exchange = tensor.exchange
        self._tensor = tensor

    def gather(self, x: Tensor) -> Tensor:
        """All-gather `x`, as `TensorParallel.gather` does."""
        return self._tensor.gather(x)

    def whole(self, logits_RV: Tensor) -> Tensor:
        """All-gather the logits of the whole vocabulary on every rank: `[R, own part] -> [R, V]`."""
        parts = [Slice.of(self.size, rank, self.ranks).count for rank in range(self.ranks)]
        width = max(parts)
        padded = torch.nn.functional.pad(logits_RV, (0, width - logits_RV.shape[1]))
        gathered = self._tensor.gather_rows(padded).view(self.ranks, *padded.shape)
        return torch.cat([gathered[rank, :, :count] for rank, count in enumerate(parts)], dim=1)


def this_host() -> int:
    """Return a 32-bit hash that is equal for processes of one host or container, which may share memory.

    It combines boot id and host name: several hosts may have the same name, and several containers share a kernel.
    """
    boot_id = BOOT_ID.read_bytes() if BOOT_ID.exists() else b""
    return zlib.crc32(boot_id + socket.gethostname().encode())


def _reach_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all ranks are on one host, each on its own device, and can read each other's memory."""
    own = torch.tensor([this_host(), device.index], dtype=torch.int64, device=device)
    of_all_ranks = own.new_empty((dist.get_world_size(group), 2))
    dist.all_gather_into_tensor(of_all_ranks, own[None], group=group)
    hosts, devices = of_all_ranks.T.tolist()
    reachable = len(set(hosts)) == 1 and len(set(devices)) == len(devices)
    reachable = reachable and all(
        other == device.index or torch.cuda.can_device_access_peer(device, other) for other in devices
    )
    on_all_ranks = torch.tensor(int(reachable), device=device)
    dist.all_reduce(on_all_ranks, dist.ReduceOp.MIN, group=group)
    return bool(on_all_ranks)


def _exchange(group: dist.ProcessGroup, device: torch.device, timeout_seconds: float) -> tuple[Tensor, Exchange]:
    """Return memory that all ranks can write to, and the `Exchange` in it, ready on all ranks. Keep both alive."""
    from torch.distributed import _symmetric_memory

    ranks, size = dist.get_world_size(group), Exchange.buffer_bytes(dist.get_world_size(group))
    shared = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(shared, group)
    buffers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks)]
    exchange = Exchange.from_buffers(buffers, dist.get_rank(group), timeout_seconds)
    ready = torch.ones(1, device=device)
    dist.all_reduce(ready, group=group)
    torch.cuda.synchronize(device)
    return shared, exchange
