"""Build representative attention steps with random tensors of a model's shape."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tok_kernels.attention.interface import AttentionShape, Phase
from tok_kernels.batch import AttentionBatch, CascadeLevel, HostLengths, HostLevel, LayerCache

_INT8_PER_ONE = 32.0  # an int8 cache stores 1.0 as 32


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Sizes of one step: decode rows, then prefill chunks.

    rows    number of decode rows
    own     positions of each row that no other row reads (its suffix after the shared prefix)
    groups  number of prefix groups of equal size that the rows form; 0: none
    prefix  positions of the prefix that the rows of a group share
    chunks  (new tokens, cached tokens) of each prefill chunk
    """

    rows: int = 0
    own: int = 0
    groups: int = 0
    prefix: int = 0
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def phase(self) -> Phase:
        """The attention phase that the step measures."""
        if not self.rows:
            return "prefill"
        return "cascade" if self.groups else "decode"

    @property
    def name(self) -> str:
        """The sizes as text, such as "3 × 512 behind 4096" (cached tokens) or "2048 × 112, 8 groups × 704"."""
        if not self.rows:
            new, cached = self.chunks[0]
            return f"{len(self.chunks)} × {new}" + (f" behind {cached}" if cached else "")
        shared = f", {self.groups} groups × {self.prefix}" if self.groups else ""
        return f"{self.rows} × {self.own}{shared}"

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of query tokens of all sequences, and of the positions of the longest sequence."""
        longest = max((new + cached for new, cached in self.chunks), default=0)
        return self.rows + sum(new for new, _ in self.chunks), max(longest, self.prefix + self.own)


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """An attention step with its tensors; kernels write to `out`."""

    step: AttentionStep
    q: Tensor
    cache: LayerCache
    batch: AttentionBatch
    scale: float
    out: Tensor = field(repr=False)


def new_problem(step: AttentionStep, shape: AttentionShape, device: torch.device, pool_bytes: int) -> AttentionProblem:
    """Return the step with random keys, values and queries, which are the same in every call.

    The KV cache has at most `pool_bytes`, so sequences may share pages. It should be far larger than the device's L2
    cache, so that reads go to memory. Raises ValueError if `rows` is no multiple of `groups`.
    """
    if step.groups and step.rows % step.groups:
        raise ValueError(f"rows is {step.rows}; allowed: multiples of groups ({step.groups})")
    tokens, longest = step.lengths
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's default generator unchanged
    cache, table = _random_cache(step, shape, pool_bytes, generator)
    host = _host_lengths(step, shape.page_size)
    kv_len, q_len = host.kv_len, host.q_len

    def ints(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    batch = AttentionBatch(
        page_table=table,
        slots=ints(np.arange(len(kv_len))),
        q_start=ints(np.concatenate(([0], np.cumsum(q_len)))),
        kv_len=ints(kv_len),
        kv_start=ints(host.kv_start),
        num_decode=step.rows,
        max_q=int(q_len.max()),
        max_kv=longest,
        levels=tuple(
            CascadeLevel(
                *(ints(one.row_start), ints(one.row_count), ints(one.row_start), ints(one.kv_start), ints(one.kv_end)),
                max_rows=step.rows // step.groups,
                max_kv=int(one.kv_end.max()),
            )
            for one in host.levels
        ),
        host=host,
    )
    q = torch.randn((tokens, shape.heads, shape.head_dim), generator=generator, dtype=shape.dtype, device=device)
    return AttentionProblem(step, q, cache, batch, shape.scale, torch.zeros_like(q))


def _host_lengths(step: AttentionStep, page_size: int) -> HostLengths:
    # A group's prefix consists of whole pages; the remaining positions are each row's own.
    prefix = _shared_pages(step, page_size) * page_size
    rows, chunks = np.ones(step.rows, np.int32), np.array(step.chunks, np.int32).reshape(-1, 2)
    q_len = np.concatenate((rows, chunks[:, 0]))
    kv_len = np.concatenate((rows * (step.prefix + step.own), chunks.sum(1, dtype=np.int32)))
    kv_start = np.concatenate((rows * prefix, chunks[:, 0] * 0)).astype(np.int32)
    if not step.groups:
        return HostLengths(q_len, kv_len, kv_start)
    group_rows = step.rows // step.groups
    zero = np.zeros(step.groups, np.int32)
    level = HostLevel(
        row_start=np.arange(step.groups, dtype=np.int32) * group_rows,
        row_count=zero + group_rows,
        kv_start=zero,
        kv_end=zero + prefix,
    )
    return HostLengths(q_len, kv_len, kv_start, (level,))


def _shared_pages(step: AttentionStep, page_size: int) -> int:
    return step.prefix // page_size if step.groups else 0


def _random_cache(
    step: AttentionStep, shape: AttentionShape, pool_bytes: int, generator: torch.Generator
) -> tuple[LayerCache, Tensor]:
    """Return a random cache, and a page table in which the rows of a group begin with the same pages."""
    device = generator.device
    sequences, shared = step.rows + len(step.chunks), _shared_pages(step, shape.page_size)
    own = -(-step.lengths[1] // shape.page_size) - shared
    page_bytes = shape.page_size * shape.position_bytes
    used = step.groups * shared + sequences * own
    pages = max(min(pool_bytes // page_bytes, used), shared + own)
    size = (pages, shape.page_size, shape.kv_heads, shape.head_dim)
    k, v = (torch.randn(size, generator=generator, dtype=shape.dtype, device=device) for _ in range(2))
    own_page = step.groups * shared + torch.arange(sequences * own, device=device).view(sequences, own)
    group = torch.arange(sequences, device=device) // max(step.rows // max(step.groups, 1), 1)
    shared_page = group.unsqueeze(1) * shared + torch.arange(shared, device=device)
    order = torch.randperm(pages, generator=generator, device=device, dtype=torch.int32)
    return new_cache(k, v, shape.cache_dtype), order[torch.cat((shared_page, own_page), 1) % pages]


def new_cache(k: Tensor, v: Tensor, dtype: torch.dtype) -> LayerCache:
    """Return a cache of `dtype` with keys and values up to about 4 in size, and with scales if `dtype` has 8 bits."""
    pages, page_size, heads, _ = k.shape
    if dtype == torch.int8:
        k, v = ((x * _INT8_PER_ONE).clamp_(-127, 127).to(dtype) for x in (k, v))
        scale = torch.full((2, pages, heads, page_size), 1 / _INT8_PER_ONE, device=k.device)
        return LayerCache(k, v, k_token_scale=scale[0], v_token_scale=scale[1])
    ones = torch.ones(heads, dtype=torch.float32, device=k.device)
    return LayerCache(k.to(dtype), v.to(dtype), *(() if dtype.itemsize > 1 else (ones, ones)))
