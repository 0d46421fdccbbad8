"""Plan split-KV decoding: if few rows leave the GPU idle, the device splits their keys into chunks of similar size.

A launch has programs for a fixed number of chunks. Each program sums the keys of all rows, computes the size of a chunk
from the sum, and finds its own chunk. A row of n blocks of keys gets ceil(n / blocks per chunk) chunks, at least one.
For example, rows of 40, 1 and 3 blocks at 4 blocks per chunk get 10, 1 and 1 chunks.

So a launch in a CUDA graph serves all lengths below its bounds. Chunks have a minimum size, a long row among short ones
is shared by more programs, and programs without a chunk end at once.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from tok_kernels import launch_config as config

ROWS = tl.constexpr(256)  # rows counted at a time
# Up to this many rows, counting the chunks in every program costs little.
_MAX_COUNTED_ROWS = 512
# Rows × key/value heads for whose programs there are counters; more are never split.
MAX_COUNTED_ROWS_AND_HEADS = 65536
# A single row of this many keys or more may take longer than all other rows together.
_LONG_ROW_KEYS = 4096


@dataclass(frozen=True, slots=True)
class SplitKVPlan:
    """Bounds of a split-KV launch.

    num_chunks     chunks for which the launch has programs
    target_chunks  number of chunks of all rows together that keeps the GPU busy
    min_keys       minimum keys of a chunk
    max_chunks     maximum chunks of a row
    """

    num_chunks: int
    target_chunks: int
    min_keys: int
    max_chunks: int


def plan_split_kv(rows: int, kv_heads: int, busy_rows: int, target_chunks: int, max_kv: int) -> SplitKVPlan | None:
    """Return the plan that splits `rows` rows of up to `max_kv` keys into about `target_chunks` chunks; None: no split.

    A split pays if `rows` is at most a quarter of `busy_rows`, the rows that keep the GPU busy without a split. It also
    pays for up to 512 rows of which one may be long.
    """
    min_keys = config.MIN_DECODE_SPLIT_KEYS
    max_chunks = min(-(-max_kv // min_keys), config.MAX_SPLITS)
    few = 4 * rows <= busy_rows or (max_kv >= _LONG_ROW_KEYS and rows <= _MAX_COUNTED_ROWS)
    if max_chunks < 2 or not few or rows * kv_heads > MAX_COUNTED_ROWS_AND_HEADS:
        return None
    return SplitKVPlan(min(rows + target_chunks, rows * max_chunks), target_chunks, min_keys, max_chunks)


def no_split_kv(rows: int) -> SplitKVPlan:
    """Return a plan that splits no row; each row's result is one chunk."""
    return SplitKVPlan(rows, target_chunks=1, min_keys=1, max_chunks=1)


@triton.jit
def find_keys(
    start_ptr: tl.tensor,
    len_ptr: tl.tensor,
    packs_ptr: tl.tensor,
    row: tl.tensor,
    present: tl.tensor,
    WINDOW: tl.constexpr,
    PACK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the first key of each row, and the end of its keys; of each pack if a pack has more than one row.

    The end of a row without keys may lie before the first; a pack without keys begins and ends at 0.
    """
    if PACK == 1:
        end = tl.load(len_ptr + row, mask=present, other=0)
        begin = tl.load(start_ptr + row, mask=present, other=0)
        if WINDOW:
            begin = tl.maximum(begin, end - WINDOW)
    else:
        end = (row * 0).to(tl.int32)
        begin = end + 0x7FFFFFFF
        for i in tl.static_range(PACK):
            member = tl.load(packs_ptr + row * PACK + i, mask=present, other=-1)
            exists = present & (member >= 0)
            row_end = tl.load(len_ptr + member, mask=exists, other=0)
            row_begin = tl.load(start_ptr + member, mask=exists, other=0)
            if WINDOW:
                row_begin = tl.maximum(row_begin, row_end - WINDOW)
            has_keys = row_begin < row_end
            begin = tl.where(has_keys, tl.minimum(begin, row_begin), begin)
            end = tl.where(has_keys, tl.maximum(end, row_end), end)
        begin = tl.minimum(begin, end)
    return begin, end


@triton.jit
def count_blocks(begin: tl.tensor, end: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Return the number of key blocks of each row or pack, given its `find_keys`; 0 without keys."""
    return tl.cdiv(tl.maximum(end - begin, 0), KEYS)


@triton.jit
def _exists(packs_ptr: tl.tensor, row: tl.tensor, rows: tl.tensor, PACK: tl.constexpr) -> tl.tensor:
    """Return whether there is such a row or pack."""
    present = row < rows
    if PACK > 1:
        present &= tl.load(packs_ptr + row * PACK, mask=present, other=-1) >= 0
    return present


@triton.jit
def count_chunks(row_blocks: tl.tensor, blocks_per_chunk: tl.tensor, max_chunks: tl.tensor) -> tl.tensor:
    """Return the number of chunks of each row, given its number of key blocks and the blocks of a chunk."""
    return tl.minimum(tl.maximum(tl.cdiv(row_blocks, blocks_per_chunk), 1), max_chunks)


@triton.jit
def find_chunk(
    start_ptr: tl.tensor,
    len_ptr: tl.tensor,
    packs_ptr: tl.tensor,
    rows: tl.tensor,
    chunk: tl.tensor,
    target_chunks: tl.tensor,
    min_keys: tl.tensor,
    max_chunks: tl.tensor,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    PACK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the row of chunk number `chunk`, the number of that row's first chunk, and the blocks of a chunk.

    The returned row is `rows` if there is no such chunk. With a PACK of more than one row, `rows` packs take the place
    of the rows; empty ones come last.
    """
    total_blocks = 0
    for base in range(0, rows, ROWS):
        row = base + tl.arange(0, ROWS)
        begin, end = find_keys(start_ptr, len_ptr, packs_ptr, row, _exists(packs_ptr, row, rows, PACK), WINDOW, PACK)
        total_blocks += tl.sum(count_blocks(begin, end, KEYS), 0)
    blocks_per_chunk = tl.maximum(tl.cdiv(total_blocks, target_chunks), tl.cdiv(min_keys, KEYS))
    chunk_row = 0
    first_chunk = 0
    chunks_before = 0
    for base in range(0, rows, ROWS):
        row = base + tl.arange(0, ROWS)
        present = _exists(packs_ptr, row, rows, PACK)
        begin, end = find_keys(start_ptr, len_ptr, packs_ptr, row, present, WINDOW, PACK)
        num_chunks = count_chunks(count_blocks(begin, end, KEYS), blocks_per_chunk, max_chunks)
        num_chunks = tl.where(present, num_chunks, 0)
        chunk_ends = chunks_before + tl.cumsum(num_chunks, 0)
        is_before = present & (chunk_ends <= chunk)
        chunk_row += tl.sum(is_before.to(tl.int32), 0)
        first_chunk = tl.maximum(first_chunk, tl.max(tl.where(is_before, chunk_ends, 0), 0))
        chunks_before += tl.sum(num_chunks, 0)
    if PACK > 1:
        chunk_row = tl.where(chunk < chunks_before, chunk_row, rows)
    return chunk_row, first_chunk, blocks_per_chunk
