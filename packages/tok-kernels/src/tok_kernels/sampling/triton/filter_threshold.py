"""Find a filter's threshold in a row: the largest value such that the entries at or above it reach a count or a mass.

A search by pivots replaces the sort. It narrows two bounds on integer keys, which have the order of the floats, so the
number of passes is bounded. Each pass over the row's relevant blocks tests three pivots between the bounds. The search
ends when no value of the logits' dtype, or none that occurs in the row, is left between the bounds.

SHIFT   number of low bits that the logits' dtype lacks compared to float32: 16 for bfloat16, whose keys have 16 bits
BLOCK   entries of a block
GROUP   blocks read at a time
LISTED  whether blocks are those of a list, see `RowBlocks`
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_INT32_MAX: tl.constexpr = tl.constexpr(0x7FFFFFFF)

_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def shift_of(dtype: torch.dtype) -> int:
    """Return SHIFT for a dtype of logits: float32, float16 or bfloat16."""
    return _SHIFT[dtype]


class RowBlocks(NamedTuple):
    """Blocks of a vector of entries: of a row of logits, or of entries that were copied from one.

    entries      pointer to the vector, in the logits' dtype or float32
    size         its number of entries
    block_list   numbers of the blocks, float32 `[block_count]`; not LISTED: the first `block_count` blocks instead
    block_count  number of blocks
    """

    entries: tl.tensor
    size: tl.tensor
    block_list: tl.tensor
    block_count: tl.tensor


class SoftmaxScale(NamedTuple):
    """A row's peak, and log2(e) / temperature, from which `weight_of` computes weights."""

    peak: tl.tensor
    inv_temperature: tl.tensor


@triton.jit
def ordered_key(value: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the key of a float32 value, int64: keys have the order of values, and both zeros have one key."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True) >> SHIFT
    return (bits ^ ((bits >> 31) & (_INT32_MAX >> SHIFT))).to(tl.int64)


@triton.jit
def key_value(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the float32 value of a key; the inverse of `ordered_key`."""
    bits = key.to(tl.int32)
    return ((bits ^ ((bits >> 31) & (_INT32_MAX >> SHIFT))) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logit: tl.tensor, scale: SoftmaxScale) -> tl.tensor:
    """Return exp((logit − peak) / temperature), float32: the probability of an entry, up to a factor."""
    return tl.exp2((logit - scale.peak) * scale.inv_temperature)


@triton.jit
def load_blocks(
    blocks: RowBlocks, first: tl.tensor, BLOCK: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Load up to GROUP blocks from the `first` one of `blocks` on.

    Return their entries, float32 `[GROUP, BLOCK]`, and their numbers `[GROUP]`. Entries past the end are −inf.
    """
    index = first + tl.arange(0, GROUP)
    number = index
    if LISTED:
        number = tl.load(blocks.block_list + index, mask=index < blocks.block_count, other=0.0).to(tl.int32)
    entry = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = (index < blocks.block_count)[:, None] & (entry < blocks.size)
    return tl.load(blocks.entries + entry, mask=present, other=-float("inf")).to(tl.float32), number


@triton.jit
def collect_entries(
    blocks: RowBlocks,
    lower_bound: tl.tensor,
    out: tl.tensor,
    limit: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Copy the entries of the listed blocks that are at least `lower_bound` to `out`, float32; return their number.

    At most `limit` entries are copied. Counting stops once the number exceeds `limit`.
    """
    count = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    while (first < blocks.block_count) & (count <= limit):
        value, _ = load_blocks(blocks, first, BLOCK, GROUP, True)
        is_kept = (value >= lower_bound).to(tl.int32)
        number = tl.sum(is_kept, axis=1)
        out_index = (count + tl.cumsum(number) - number)[:, None] + tl.cumsum(is_kept, axis=1) - 1
        tl.store(out + out_index, value, mask=(is_kept != 0) & (out_index < limit))
        count += tl.sum(number)
        first += GROUP
    return count


@triton.jit
def mass_at_or_above(
    blocks: RowBlocks,
    threshold: tl.tensor,
    scale: SoftmaxScale,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the weights of the entries at or above `threshold`: float64."""
    sums = tl.zeros((GROUP, BLOCK), tl.float32)
    for first in range(0, blocks.block_count, GROUP):
        value, _ = load_blocks(blocks, first, BLOCK, GROUP, LISTED)
        sums += tl.where(value >= threshold, weight_of(value, scale), 0.0)
    return tl.sum(tl.sum(sums, axis=1).to(tl.float64))


@triton.jit
def find_threshold(
    blocks: RowBlocks,
    lower_bound: tl.tensor,
    target: tl.tensor,
    scale: SoftmaxScale,
    COUNTING: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the largest value from `lower_bound` to the peak such that the entries at or above it reach the target.

    With COUNTING, the target is a number of entries; otherwise it is a sum of their weights. It is float64. Return
    `lower_bound` if no value reaches the target.
    """
    # The threshold's key is at least `low_key` and less than `high_key`.
    low_key, high_key = ordered_key(lower_bound, SHIFT), ordered_key(scale.peak, SHIFT) + 1
    round_index = 0
    while high_key - low_key > 1:
        pivots = _choose_pivots(low_key, high_key, round_index, SHIFT)
        reached, nearest = _test_pivots(
            blocks, pivots, low_key, high_key, target, scale, COUNTING, SHIFT, BLOCK, GROUP, LISTED
        )
        if SHIFT == 0:
            # Move each bound to the nearest entry between the bounds, since the threshold is an entry.
            low_key = tl.maximum(low_key, ordered_key(nearest[0], SHIFT))
            high_key = tl.minimum(high_key, ordered_key(nearest[1], SHIFT) + 1)
        low_key, high_key = _narrow(low_key, high_key, pivots, reached)
        round_index += 1
    return key_value(low_key, SHIFT)


@triton.jit
def _choose_pivots(
    low_key: tl.tensor, high_key: tl.tensor, round_index: tl.tensor, SHIFT: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return three ascending keys strictly between the bounds.

    Even rounds quarter the range of values, which suits logits, since keys are dense around 0. Odd rounds quarter the
    range of keys, which guarantees that the search ends.
    """
    low = key_value(low_key, SHIFT)
    step = (key_value(high_key - 1, SHIFT) - low) * 0.25
    span = high_key - low_key
    is_even = round_index % 2 == 0
    pivot1 = tl.where(is_even, ordered_key(low + step, SHIFT), low_key + (span + 3) // 4)
    pivot2 = tl.where(is_even, ordered_key(low + step * 2, SHIFT), low_key + (span + 1) // 2)
    pivot3 = tl.where(is_even, ordered_key(low + step * 3, SHIFT), low_key + (3 * span + 3) // 4)
    pivot1 = tl.minimum(tl.maximum(pivot1, low_key + 1), high_key - 1)
    pivot2 = tl.minimum(tl.maximum(pivot2, pivot1), high_key - 1)
    return pivot1, pivot2, tl.minimum(tl.maximum(pivot3, pivot2), high_key - 1)


@triton.jit
def _test_pivots(
    blocks: RowBlocks,
    pivots: tl.tuple,
    low_key: tl.tensor,
    high_key: tl.tensor,
    target: tl.tensor,
    scale: SoftmaxScale,
    COUNTING: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tuple[tl.tuple, ...]:
    """Read the entries once, and return two tuples.

    reached  for each of the three pivots: whether the entries at or above it reach the target
    nearest  with SHIFT 0: the smallest entry from `low_key` on, and the largest one below `high_key`
    """
    value1, value2, value3 = key_value(pivots[0], SHIFT), key_value(pivots[1], SHIFT), key_value(pivots[2], SHIFT)
    sum1 = tl.zeros((GROUP, BLOCK), tl.float32)
    sum2 = tl.zeros((GROUP, BLOCK), tl.float32)
    sum3 = tl.zeros((GROUP, BLOCK), tl.float32)
    smallest = tl.full((GROUP, BLOCK), float("inf"), tl.float32)
    largest = tl.full((GROUP, BLOCK), -float("inf"), tl.float32)
    low_value, high_value = key_value(low_key, SHIFT), key_value(high_key, SHIFT)
    for first in range(0, blocks.block_count, GROUP):
        value, _ = load_blocks(blocks, first, BLOCK, GROUP, LISTED)
        weight = tl.full((GROUP, BLOCK), 1.0, tl.float32) if COUNTING else weight_of(value, scale)
        sum1 += tl.where(value >= value1, weight, 0.0)
        sum2 += tl.where(value >= value2, weight, 0.0)
        sum3 += tl.where(value >= value3, weight, 0.0)
        if SHIFT == 0:
            smallest = tl.minimum(smallest, tl.where(value >= low_value, value, float("inf")))
            largest = tl.maximum(largest, tl.where(value < high_value, value, -float("inf")))
    reached = (_reaches(sum1, target), _reaches(sum2, target), _reaches(sum3, target))
    return reached, (tl.min(smallest), tl.max(largest))


@triton.jit
def _reaches(sums: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Return whether the total of float32 sums, `[GROUP, BLOCK]`, reaches the float64 target."""
    return tl.sum(tl.sum(sums, axis=1).to(tl.float64)) >= target


@triton.jit
def _narrow(low_key: tl.tensor, high_key: tl.tensor, pivots: tl.tuple, reached: tl.tuple) -> tuple[tl.tensor, ...]:
    """Return the bounds, moved to the last pivot that reaches the target and to the first that does not."""
    last_reached = tl.where(reached[1], pivots[1], tl.where(reached[0], pivots[0], low_key))
    last_reached = tl.where(reached[2], pivots[2], last_reached)
    first_missed = tl.where(reached[1], tl.where(reached[2], high_key, pivots[2]), pivots[1])
    first_missed = tl.where(reached[0], first_missed, pivots[0])
    return tl.maximum(low_key, last_reached), tl.minimum(high_key, first_missed)


@triton.jit
def kth_largest(values: tl.tensor, k: tl.tensor, lower_bound: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the k-th largest entry of the vector `values`, but at least `lower_bound`."""
    low_key, high_key = ordered_key(lower_bound, SHIFT), ordered_key(tl.max(values), SHIFT) + 1
    while high_key - low_key > 1:
        middle = (low_key + high_key) // 2
        enough = tl.sum((values >= key_value(middle, SHIFT)).to(tl.int32)) >= k
        low_key, high_key = tl.where(enough, middle, low_key), tl.where(enough, high_key, middle)
    return key_value(low_key, SHIFT)
