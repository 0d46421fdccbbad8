"""Split-KV scheduling: cut long rows into chunks of about equal size on the device where few rows leave a GPU idle.

A launch has room for a fixed number of chunks. Each program adds up the keys of all rows, so that it knows how long
a chunk is, and finds its own; a row of n blocks of keys gets ceil(n / blocks a chunk) of them, and at least one.
One captured launch thus serves every length below its bounds: a short row is not cut smaller than pays, a long one
among short ones is shared by more programs, and programs for which no chunk is left end at once.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from tok_kernels import launch_config as config

ROWS = tl.constexpr(256)  # rows counted at a time
# Up to so many rows counting is cheap, and a single long one could keep all others waiting.
_MOST_ROWS, _LONG = 512, 4096


@dataclass(frozen=True, slots=True)
class SplitKVPlan:
    """`number` is the room of a launch; `wanted` chunks of all rows together are aimed at, each of `least` keys or
    more, and no row is cut into more than `most`."""

    number: int
    wanted: int
    least: int
    most: int


def plan_split_kv(rows: int, wanted: int, max_kv: int) -> SplitKVPlan | None:
    """How to cut the keys of `rows` rows, none longer than `max_kv`, for `wanted` programs; None: not at all.

    It pays where each row would otherwise have less than half of its share of the programs, and for rows that may be
    long among not too many.
    """
    least = config.DECODE_SPLIT_KEYS
    most = min(-(-max_kv // least), config.MAX_SPLITS)
    few = 2 * rows <= wanted or (max_kv >= _LONG and rows <= _MOST_ROWS)
    if most < 2 or not few:
        return None
    return SplitKVPlan(min(rows + wanted, rows * most), wanted, least, most)


def no_split_kv(rows: int) -> SplitKVPlan:
    """Nothing is cut, but results are parts."""
    return SplitKVPlan(rows, wanted=1, least=1, most=1)


@triton.jit
def blocks(start_ptr, len_ptr, row, present, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Blocks of keys of rows; none of a row that has ended."""
    keys = tl.load(len_ptr + row, mask=present, other=0) - tl.load(start_ptr + row, mask=present, other=0)
    if WINDOW:
        keys = tl.minimum(keys, WINDOW)
    return tl.cdiv(tl.maximum(keys, 0), KEYS)


@triton.jit
def chunks_of(row_blocks, blocks_each, most):
    """How many chunks rows of so many blocks are cut into."""
    return tl.minimum(tl.maximum(tl.cdiv(row_blocks, blocks_each), 1), most)


@triton.jit
def find_chunk(start_ptr, len_ptr, rows, chunk, wanted, least, most, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """The row that the `chunk`-th chunk of all belongs to (`rows`: there is none), how many lie before that row's
    first, and the blocks that a chunk is to hold."""
    total = 0
    for base in range(0, rows, ROWS):
        row = base + tl.arange(0, ROWS)
        total += tl.sum(blocks(start_ptr, len_ptr, row, row < rows, KEYS, WINDOW), 0)
    blocks_each = tl.maximum(tl.cdiv(total, wanted), tl.cdiv(least, KEYS))
    passed = 0
    skipped = 0
    counted = 0
    for base in range(0, rows, ROWS):
        row = base + tl.arange(0, ROWS)
        present = row < rows
        number = chunks_of(blocks(start_ptr, len_ptr, row, present, KEYS, WINDOW), blocks_each, most)
        number = tl.where(present, number, 0)
        ends = counted + tl.cumsum(number, 0)
        done = present & (ends <= chunk)
        passed += tl.sum(done.to(tl.int32), 0)
        skipped = tl.maximum(skipped, tl.max(tl.where(done, ends, 0), 0))
        counted += tl.sum(number, 0)
    return passed, skipped, blocks_each
