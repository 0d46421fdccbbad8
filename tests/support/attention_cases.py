"""Build random attention steps over a cache that holds NaN wherever nothing was written, and compute their oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tok_kernels import AttentionBatch, CascadeLevel, LayerCache

# Runs of (shared pages, subgroups of (shared pages, own tokens of each row)).
Runs = tuple[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]], ...]


@dataclass(frozen=True)
class Shape:
    """The shape of a random step: runs of decode rows that share pages on two levels, and prefill chunks."""

    page_size: int
    kv_heads: int
    group: int
    head_dim: int
    runs: Runs
    prefill: tuple[tuple[int, int], ...]  # (new tokens, cached tokens)
    seed: int


MIXED = Shape(
    page_size=16,
    kv_heads=2,
    group=3,
    head_dim=32,
    runs=((3, ((0, (1, 2, 17)), (1, (33,)))), (0, ((1, (5, 20)),))),
    prefill=((20, 0), (3, 40)),
    seed=4,
)
"""Decode rows with and without prefixes on both levels, and two chunks, one of them behind cached tokens."""


@dataclass(frozen=True)
class Case:
    q: Tensor
    cache: LayerCache
    batch: AttentionBatch
    scale: float


class Pool:
    """A page allocator that hands out ids in random order and records which rows of pages were written."""

    def __init__(self, pages: int, page_size: int, rng: np.random.Generator) -> None:
        self.free = rng.permutation(pages).tolist()
        self.page_size = page_size
        self.written = np.zeros((pages, page_size), dtype=bool)

    def take(self, positions: int) -> list[int]:
        pages = [self.free.pop() for _ in range(-(-positions // self.page_size))]
        for i, page in enumerate(pages):
            self.written[page, : positions - i * self.page_size] = True
        return pages


def _pages(shape: Shape) -> int:
    lengths = [own for _, subs in shape.runs for _, rows in subs for own in rows]
    lengths += [new + cached for new, cached in shape.prefill]
    shared = sum(outer + sum(inner for inner, _ in subs) for outer, subs in shape.runs)
    return shared + sum(-(-length // shape.page_size) for length in lengths)


def build(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> Case:
    """Build a step of the given shape, in a cache that holds NaN wherever no sequence has written."""
    rng, ps = np.random.default_rng(shape.seed), shape.page_size
    pool = Pool(_pages(shape) + 300, ps, rng)  # spare pages that no sequence takes
    tables: list[list[int]] = []
    kv_len: list[int] = []
    kv_start: list[int] = []
    levels: tuple[list[tuple[int, ...]], ...] = ([], [])  # (row_start, row_count, slot row, kv_start, kv_end)
    for outer, subs in shape.runs:
        first, outer_pages = len(tables), pool.take(outer * ps)
        for inner, lengths in subs:
            sub_first, shared = len(tables), outer_pages + pool.take(inner * ps)
            for length in lengths:
                tables.append(shared + pool.take(length))
                kv_len.append(len(shared) * ps + length)
                kv_start.append(len(shared) * ps)
            levels[1].append((sub_first, len(lengths), sub_first, outer * ps, len(shared) * ps))
        levels[0].append((first, len(tables) - first, first, 0, outer * ps))
    decode = len(tables)
    for new, cached in shape.prefill:
        tables.append(pool.take(new + cached))
        kv_len.append(new + cached)
        kv_start.append(0)
    q_len = [1] * decode + [new for new, _ in shape.prefill]
    slots = rng.permutation(len(tables) + 2)[: len(tables)]
    page_table = np.full((len(tables) + 2, max(map(len, tables)) + 2), pool.free.pop())
    for slot, table in zip(slots, tables, strict=True):
        page_table[slot, : len(table)] = table

    def ints(values: object) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)

    def level(groups: list[tuple[int, ...]]) -> CascadeLevel:
        # The empty group represents the padding of a fixed-size launch.
        column = np.array([*groups, (0, 0, 0, 0, 0)]).T
        rows, lengths = int(column[1].max()), int((column[4] - column[3]).max())
        row_start, row_count, slot_row, start, end = column
        return CascadeLevel(
            ints(row_start), ints(row_count), ints(slots[slot_row]), ints(start), ints(end), rows, lengths
        )

    def noise(*size: int) -> Tensor:
        return torch.tensor(rng.standard_normal(size), dtype=dtype, device=device)

    gap = torch.tensor(~pool.written, device=device)[..., None, None]
    kv_size = (*pool.written.shape, shape.kv_heads, shape.head_dim)
    cache = LayerCache(noise(*kv_size).masked_fill(gap, torch.nan), noise(*kv_size).masked_fill(gap, torch.nan))
    batch = AttentionBatch(
        page_table=ints(page_table),
        slots=ints(slots),
        q_start=ints(np.cumsum([0, *q_len])),
        kv_len=ints(kv_len),
        kv_start=ints(kv_start),
        num_decode=decode,
        max_q=max(q_len),
        max_kv=max(kv_len),
        levels=tuple(level(groups) for groups in levels) if decode else (),
    )
    q = noise(sum(q_len), shape.kv_heads * shape.group, shape.head_dim)
    return Case(q, cache, batch, shape.head_dim**-0.5)


def oracle(case: Case, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention in float64, one query token at a time over all its visible positions, without groups."""
    q, k, v = (x.double().cpu().numpy() for x in (case.q, case.cache.k, case.cache.v))
    table, slots, q_start, kv_len = (
        x.cpu().numpy() for x in (case.batch.page_table, case.batch.slots, case.batch.q_start, case.batch.kv_len)
    )
    ps, group = case.cache.page_size, q.shape[1] // k.shape[2]
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    for b, slot in enumerate(slots):
        for t in range(q_start[b], q_start[b + 1]):
            position = np.arange(kv_len[b] - (q_start[b + 1] - t) + 1)[-(window or 0) :]
            page, offset = table[slot, position // ps], position % ps
            keys, values = (np.repeat(x[page, offset], group, axis=1) for x in (k, v))
            score = np.einsum("hd,lhd->hl", q[t], keys) * case.scale
            weight = np.exp(score - score.max(-1, keepdims=True))
            out[t] = np.einsum("hl,lhd->hd", weight / weight.sum(-1, keepdims=True), values)
            lse[t] = np.log(weight.sum(-1)) + score.max(-1)
    return out, lse


def without_unseen(case: Case, window: int) -> Case:
    """Return the step over a cache that holds NaN wherever no query's window reaches."""
    batch, ps = case.batch, case.cache.page_size
    seen = torch.zeros(case.cache.k.shape[:2], dtype=torch.bool, device=case.q.device)
    for slot, count, end in zip(
        batch.slots.tolist(), batch.q_start.diff().tolist(), batch.kv_len.tolist(), strict=True
    ):
        position = torch.arange(max(0, end - count + 1 - window), end, device=case.q.device)
        seen[batch.page_table[slot, position // ps].long(), position % ps] = True
    unseen = ~seen[..., None, None]
    cache = LayerCache(*(x.masked_fill(unseen, torch.nan) for x in (case.cache.k, case.cache.v)))
    return replace(case, cache=cache)


def spoil(case: Case, *places: tuple[int, int]) -> None:
    """Set the key and value to NaN at each `(sequence, position)` of `places`."""
    for sequence, position in places:
        page = case.batch.page_table[case.batch.slots[sequence].long(), position // case.cache.page_size].long()
        for cached in (case.cache.k, case.cache.v):
            cached[page, position % case.cache.page_size] = torch.nan


def flat(case: Case) -> Case:
    """Return the step without cascade levels: every row reads all its keys itself."""
    batch = replace(case.batch, kv_start=torch.zeros_like(case.batch.kv_start), levels=())
    return replace(case, batch=batch)
