"""Find a filter's threshold in a row: the largest value such that the entries at or above it reach a count or a mass.

A search by pivots replaces the sort. It narrows two bounds on integer keys, which have the order of the floats, so the
number of passes is bounded. Each pass over the row's relevant blocks tests three pivots between the bounds. The search
ends when no value of the logits' dtype, or none that occurs in the row, is left between the bounds.

SHIFT is the number of low bits that the logits' dtype lacks compared to float32: 16 for bfloat16, whose keys have 16
bits.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_INT32_MAX: tl.constexpr = tl.constexpr(0x7FFFFFFF)

_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def shift_of(dtype: torch.dtype) -> int:
    """Return SHIFT for a dtype of logits: float32, float16 or bfloat16."""
    return _SHIFT[dtype]


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
def load_blocks(
    values: tl.tensor,
    block_list: tl.tensor,
    first: tl.tensor,
    block_count: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr = True,
) -> tuple[tl.tensor, ...]:
    """Load up to GROUP blocks of `values`; return their entries, float32 `[GROUP, BLOCK]`, and their numbers `[GROUP]`.

    With LISTED, the blocks are `block_list[first]`, `block_list[first + 1]` and so on, and the list has `block_count`
    entries. Otherwise the blocks are `first`, `first + 1` and so on, up to `block_count`. Entries past the end of
    `values`, which has `vocabulary` entries, are −inf.
    """
    list_index = first + tl.arange(0, GROUP)
    block = list_index
    if LISTED:
        block = tl.load(block_list + list_index, mask=list_index < block_count, other=0.0).to(tl.int32)
    entries = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = (list_index < block_count)[:, None] & (entries < vocabulary)
    return tl.load(values + entries, mask=present, other=-float("inf")).to(tl.float32), block


@triton.jit
def collect_entries(
    values: tl.tensor,
    block_list: tl.tensor,
    block_count: tl.tensor,
    vocabulary: tl.tensor,
    low: tl.tensor,
    out: tl.tensor,
    limit: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Write the entries of the listed blocks that are at least `low` to `out`, float32, and return their number.

    At most `limit` entries are written. Counting stops once the number exceeds `limit`.
    """
    count = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    while (first < block_count) & (count <= limit):
        value, _ = load_blocks(values, block_list, first, block_count, vocabulary, BLOCK, GROUP)
        is_kept = (value >= low).to(tl.int32)
        number = tl.sum(is_kept, axis=1)
        out_index = (count + tl.cumsum(number) - number)[:, None] + tl.cumsum(is_kept, axis=1) - 1
        tl.store(out + out_index, value, mask=(is_kept != 0) & (out_index < limit))
        count += tl.sum(number)
        first += GROUP
    return count


@triton.jit
def mass_at_or_above(
    values: tl.tensor,
    block_list: tl.tensor,
    block_count: tl.tensor,
    vocabulary: tl.tensor,
    threshold: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the sum of exponentials, relative to the peak, of the entries at or above `threshold`: float64."""
    sums = tl.zeros((GROUP, BLOCK), tl.float32)
    for first in range(0, block_count, GROUP):
        value, _ = load_blocks(values, block_list, first, block_count, vocabulary, BLOCK, GROUP, LISTED)
        sums += tl.where(value >= threshold, tl.exp2((value - peak) * inv_temperature), 0.0)
    return tl.sum(tl.sum(sums, axis=1).to(tl.float64))


@triton.jit
def find_threshold(
    values: tl.tensor,
    block_list: tl.tensor,
    block_count: tl.tensor,
    vocabulary: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    COUNTING: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the largest value from `low` to `peak` such that the entries at or above it reach the target.

    With COUNTING, the target is a number of entries. Otherwise it is a sum of exponentials relative to the peak. Return
    `low` if no value reaches the target. `values` to `vocabulary` and LISTED are those of `load_blocks`.
    """
    low_key, high_key = ordered_key(low, SHIFT), ordered_key(peak, SHIFT) + 1
    round_index = 0
    while high_key - low_key > 1:
        pivot1, pivot2, pivot3 = _pivots(low_key, high_key, round_index, SHIFT)
        value1, value2, value3 = key_value(pivot1, SHIFT), key_value(pivot2, SHIFT), key_value(pivot3, SHIFT)
        sum1 = tl.zeros((GROUP, BLOCK), tl.float32)
        sum2 = tl.zeros((GROUP, BLOCK), tl.float32)
        sum3 = tl.zeros((GROUP, BLOCK), tl.float32)
        smallest = tl.full((GROUP, BLOCK), float("inf"), tl.float32)
        largest = tl.full((GROUP, BLOCK), -float("inf"), tl.float32)
        bottom_value, top_value = key_value(low_key, SHIFT), key_value(high_key, SHIFT)
        for first in range(0, block_count, GROUP):
            value, _ = load_blocks(values, block_list, first, block_count, vocabulary, BLOCK, GROUP, LISTED)
            weight = tl.full((GROUP, BLOCK), 1.0, tl.float32) if COUNTING else tl.exp2((value - peak) * inv_temperature)
            sum1 += tl.where(value >= value1, weight, 0.0)
            sum2 += tl.where(value >= value2, weight, 0.0)
            sum3 += tl.where(value >= value3, weight, 0.0)
            if SHIFT == 0:
                smallest = tl.minimum(smallest, tl.where(value >= bottom_value, value, float("inf")))
                largest = tl.maximum(largest, tl.where(value < top_value, value, -float("inf")))
        reaches1, reaches2, reaches3 = _reaches(sum1, target), _reaches(sum2, target), _reaches(sum3, target)
        if SHIFT == 0:
            # Move each bound to the nearest entry between the bounds, since the threshold is an entry.
            low_key = tl.maximum(low_key, ordered_key(tl.min(smallest), SHIFT))
            high_key = tl.minimum(high_key, ordered_key(tl.max(largest), SHIFT) + 1)
        reached = tl.where(reaches3, pivot3, tl.where(reaches2, pivot2, tl.where(reaches1, pivot1, low_key)))
        low_key = tl.maximum(low_key, reached)
        missed = tl.where(reaches1, tl.where(reaches2, tl.where(reaches3, high_key, pivot3), pivot2), pivot1)
        high_key = tl.minimum(high_key, missed)
        round_index += 1
    return key_value(low_key, SHIFT)


@triton.jit
def _reaches(sums: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Return whether the total of float32 sums, `[GROUP, BLOCK]`, reaches the float64 target."""
    return tl.sum(tl.sum(sums, axis=1).to(tl.float64)) >= target


@triton.jit
def _pivots(
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
def kth_largest(values: tl.tensor, k: tl.tensor, low: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the k-th largest entry of the vector `values`, but at least `low`."""
    low_key, high_key = ordered_key(low, SHIFT), ordered_key(tl.max(values), SHIFT) + 1
    while high_key - low_key > 1:
        middle = (low_key + high_key) // 2
        enough = tl.sum((values >= key_value(middle, SHIFT)).to(tl.int32)) >= k
        low_key, high_key = tl.where(enough, middle, low_key), tl.where(enough, high_key, middle)
    return key_value(low_key, SHIFT)
