"""Find a filter's threshold in a row: the largest value such that the entries not below it reach a count or a mass.

The search needs no sort. It bisects integer keys that have the order of the floats, so the number of passes is bounded.
Each pass over the row's relevant blocks tests three values between the bounds. The bounds approach the threshold until
no value of the logits' dtype, or none that occurs, is left between them.

SHIFT is the number of low float32 bits that the logits' dtype lacks: keys of bfloat16 are 16 bits wide.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ALL: tl.constexpr = tl.constexpr(0x7FFFFFFF)

_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def shift_of(dtype: torch.dtype) -> int:
    """Return SHIFT for logits of float32, float16 or bfloat16."""
    return _SHIFT[dtype]


@triton.jit
def key_of(x: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the int64 key of a value; both zeros have the same key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True) >> SHIFT
    return (bits ^ ((bits >> 31) & (_ALL >> SHIFT))).to(tl.int64)


@triton.jit
def value_of(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the float32 value that has this key."""
    bits = key.to(tl.int32)
    return ((bits ^ ((bits >> 31) & (_ALL >> SHIFT))) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def tile_of(
    line: tl.tensor,
    order: tl.tensor,
    first: tl.tensor,
    active: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr = True,
) -> tuple[tl.tensor, ...]:
    """Return the entries of up to GROUP blocks of the row, float32 `[GROUP, BLOCK]`, and the blocks' numbers.

    With LISTED, the numbers of the blocks are the entries of `order` from `first` on, of which there are `active`.
    Otherwise they are `first`, `first + 1` and so on. Entries past the end are −inf.
    """
    nth = first + tl.arange(0, GROUP)
    block = nth
    if LISTED:
        block = tl.load(order + nth, mask=nth < active, other=0.0).to(tl.int32)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = (nth < active)[:, None] & (at < vocabulary)
    return tl.load(line + at, mask=present, other=-float("inf")).to(tl.float32), block


@triton.jit
def gather(
    line: tl.tensor,
    order: tl.tensor,
    active: tl.tensor,
    vocabulary: tl.tensor,
    low: tl.tensor,
    to: tl.tensor,
    largest: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Write the listed blocks' entries not below `low` to `to`, float32, and return their number.

    At most `largest` entries are written, and counting stops once the number exceeds `largest`.
    """
    count = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    while (first < active) & (count <= largest):
        x, _ = tile_of(line, order, first, active, vocabulary, BLOCK, GROUP)
        hit = (x >= low).to(tl.int32)
        number = tl.sum(hit, axis=1)
        place = (count + tl.cumsum(number) - number)[:, None] + tl.cumsum(hit, axis=1) - 1
        tl.store(to + place, x, mask=(hit != 0) & (place < largest))
        count += tl.sum(number)
        first += GROUP
    return count


@triton.jit
def mass_from(
    line: tl.tensor,
    order: tl.tensor,
    active: tl.tensor,
    vocabulary: tl.tensor,
    threshold: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the sum of exponentials, relative to the peak, of the entries not below `threshold`: float64."""
    sums = tl.zeros((GROUP, BLOCK), tl.float32)
    for first in range(0, active, GROUP):
        x, _ = tile_of(line, order, first, active, vocabulary, BLOCK, GROUP, LISTED)
        sums += tl.where(x >= threshold, tl.exp2((x - peak) * inv_temperature), 0.0)
    return tl.sum(tl.sum(sums, axis=1).to(tl.float64))


@triton.jit
def find_threshold(
    line: tl.tensor,
    order: tl.tensor,
    active: tl.tensor,
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
    """Return the largest value from `low` to `peak` such that the entries not below it reach the target.

    With COUNTING, the target is a number of entries, otherwise a mass relative to the peak. Return `low` if no value
    reaches the target.
    """
    bottom, top = key_of(low, SHIFT), key_of(peak, SHIFT) + 1
    turn = 0
    while top - bottom > 1:
        one, two, three = _pivots(bottom, top, turn, SHIFT)
        q1, q2, q3 = value_of(one, SHIFT), value_of(two, SHIFT), value_of(three, SHIFT)
        sum1 = tl.zeros((GROUP, BLOCK), tl.float32)
        sum2 = tl.zeros((GROUP, BLOCK), tl.float32)
        sum3 = tl.zeros((GROUP, BLOCK), tl.float32)
        smallest = tl.full((GROUP, BLOCK), float("inf"), tl.float32)
        largest = tl.full((GROUP, BLOCK), -float("inf"), tl.float32)
        above, below = value_of(bottom, SHIFT), value_of(top, SHIFT)
        for first in range(0, active, GROUP):
            x, _ = tile_of(line, order, first, active, vocabulary, BLOCK, GROUP, LISTED)
            weight = tl.full((GROUP, BLOCK), 1.0, tl.float32) if COUNTING else tl.exp2((x - peak) * inv_temperature)
            sum1 += tl.where(x >= q1, weight, 0.0)
            sum2 += tl.where(x >= q2, weight, 0.0)
            sum3 += tl.where(x >= q3, weight, 0.0)
            if SHIFT == 0:
                smallest = tl.minimum(smallest, tl.where(x >= above, x, float("inf")))
                largest = tl.maximum(largest, tl.where(x < below, x, -float("inf")))
        reach1, reach2, reach3 = _reaches(sum1, target), _reaches(sum2, target), _reaches(sum3, target)
        if SHIFT == 0:
            # No entry lies between a bound and the entry nearest to it within the bounds.
            bottom = tl.maximum(bottom, key_of(tl.min(smallest), SHIFT))
            top = tl.minimum(top, key_of(tl.max(largest), SHIFT) + 1)
        bottom = tl.maximum(bottom, tl.where(reach3, three, tl.where(reach2, two, tl.where(reach1, one, bottom))))
        top = tl.minimum(top, tl.where(reach1, tl.where(reach2, tl.where(reach3, top, three), two), one))
        turn += 1
    return value_of(bottom, SHIFT)


@triton.jit
def _reaches(sums: tl.tensor, target: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(sums, axis=1).to(tl.float64)) >= target


@triton.jit
def _pivots(bottom: tl.tensor, top: tl.tensor, turn: tl.tensor, SHIFT: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return three keys strictly between the bounds: quarters of the values in even turns, of the keys in odd turns.

    Quarters of the values suit logits, since keys are dense around 0. Quarters of the keys guarantee that the search
    ends.
    """
    low = value_of(bottom, SHIFT)
    step = (value_of(top - 1, SHIFT) - low) * 0.25
    span = top - bottom
    even = turn % 2 == 0
    one = tl.where(even, key_of(low + step, SHIFT), bottom + (span + 3) // 4)
    two = tl.where(even, key_of(low + step * 2, SHIFT), bottom + (span + 1) // 2)
    three = tl.where(even, key_of(low + step * 3, SHIFT), bottom + (3 * span + 3) // 4)
    one = tl.minimum(tl.maximum(one, bottom + 1), top - 1)
    two = tl.minimum(tl.maximum(two, one), top - 1)
    return one, two, tl.minimum(tl.maximum(three, two), top - 1)


@triton.jit
def kth_largest(values: tl.tensor, k: tl.tensor, low: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the k-th largest entry of a vector, or `low` if `low` is larger."""
    bottom, top = key_of(low, SHIFT), key_of(tl.max(values), SHIFT) + 1
    while top - bottom > 1:
        middle = (bottom + top) // 2
        enough = tl.sum((values >= value_of(middle, SHIFT)).to(tl.int32)) >= k
        bottom, top = tl.where(enough, middle, bottom), tl.where(enough, top, middle)
    return value_of(bottom, SHIFT)
