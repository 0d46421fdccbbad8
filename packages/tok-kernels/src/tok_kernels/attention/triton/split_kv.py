"""Plan split-KV decoding: split long rows on the device into chunks of about equal size, if few rows leave a GPU idle.

A launch has programs for a fixed number of chunks. Each program sums the keys of all rows, which gives the size of a
chunk, and then finds its own chunk. A row of n blocks of keys gets ceil(n / blocks per chunk) chunks, at least one. For
example, rows of 40, 1 and 3 blocks at 4 blocks per chunk get 10, 1 and 1 chunks.

One captured launch thus serves all lengths below its bounds. Chunks do not become too small to pay, a long row among
short ones is shared by more programs, and programs without a chunk end at once.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from tok_kernels import launch_config as config

ROWS = tl.constexpr(256)  # rows counted at a time
# With at most this many rows, counting is cheap, and a single row of at least this many keys could delay the others.
_MOST_ROWS, _LONG = 512, 4096


@dataclass(frozen=True, slots=True)
class SplitKVPlan:
    """Bounds of a split-KV launch.

    number  chunks for which the launch has programs
    wanted  target number of chunks over all rows together
    min_keys  minimum keys per chunk
    max_chunks  maximum chunks per row
    """

    number: int
    wanted: int
    min_keys: int
    max_chunks: int


def plan_split_kv(rows: int, wanted: int, max_kv: int) -> SplitKVPlan | None:
    """Return how to split the keys of `rows` rows, none longer than `max_kv`, for `wanted` programs; None: no split.

    Splitting pays if `rows` is at most half of `wanted`, and for rows that may be long if there are not too many of
    them.
    """
    min_keys = config.DECODE_SPLIT_KEYS
    max_chunks = min(-(-max_kv // min_keys), config.MAX_SPLITS)
    few = 2 * rows <= wanted or (max_kv >= _LONG and rows <= _MOST_ROWS)
    if max_chunks < 2 or not few:
        return None
    return SplitKVPlan(min(rows + wanted, rows * max_chunks), wanted, min_keys, max_chunks)


def no_split_kv(rows: int) -> SplitKVPlan:
    """Return a plan that splits no row but writes each result as a partial result."""
    return SplitKVPlan(rows, wanted=1, min_keys=1, max_chunks=1)


@triton.jit
def blocks(
    start_ptr: tl.tensor,
    len_ptr: tl.tensor,
    row: tl.tensor,
    present: tl.tensor,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Return the blocks of keys of rows; 0 for a row that has ended."""
    keys = tl.load(len_ptr + row, mask=present, other=0) - tl.load(start_ptr + row, mask=present, other=0)
    if WINDOW:
        keys = tl.minimum(keys, WINDOW)
    return tl.cdiv(tl.maximum(keys, 0), KEYS)


@triton.jit
def chunks_of(row_blocks: tl.tensor, blocks_each: tl.tensor, max_chunks: tl.tensor) -> tl.tensor:
    """Return the number of chunks of rows with `row_blocks` blocks each."""
    return tl.minimum(tl.maximum(tl.cdiv(row_blocks, blocks_each), 1), max_chunks)


@triton.jit
def find_chunk(
    start_ptr: tl.tensor,
    len_ptr: tl.tensor,
    rows: tl.tensor,
    chunk: tl.tensor,
    wanted: tl.tensor,
    min_keys: tl.tensor,
    max_chunks: tl.tensor,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the row of chunk number `chunk`, the chunks before that row's first, and the blocks per chunk.

    A returned row of `rows` means that there is no such chunk.
    """
    total = 0
    for base in range(0, rows, ROWS):
        row = base + tl.arange(0, ROWS)
        total += tl.sum(blocks(start_ptr, len_ptr, row, row < rows, KEYS, WINDOW), 0)
    blocks_each = tl.maximum(tl.cdiv(total, wanted), tl.cdiv(min_keys, KEYS))
    passed = 0
    skipped = 0
    counted = 0
    for base in range(0, rows, ROWS):
        row = base + tl.arange(0, ROWS)
        present = row < rows
        number = chunks_of(blocks(start_ptr, len_ptr, row, present, KEYS, WINDOW), blocks_each, max_chunks)
        number = tl.where(present, number, 0)
        ends = counted + tl.cumsum(number, 0)
        done = present & (ends <= chunk)
        passed += tl.sum(done.to(tl.int32), 0)
        skipped = tl.maximum(skipped, tl.max(tl.where(done, ends, 0), 0))
        counted += tl.sum(number, 0)
    return passed, skipped, blocks_each
