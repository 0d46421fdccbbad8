"""Define device functions that sample one row of a sharded vocabulary: local sums, owner of the token, token.

`tok_kernels.sampling.reference.shards` describes the four numbers that the ranks send each other, and the owner.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tok_kernels.sampling.triton.block_sampling import (
    LOG2E,
    at_temperature,
    finite,
    first_hit,
    first_passed,
    inv_temperature_of,
    uniform,
)


@triton.jit
def own_sums(
    peaks: tl.tensor,
    sums: tl.tensor,
    masses: tl.tensor,
    temperature: tl.tensor,
    row: tl.tensor,
    blocks: tl.tensor,
    SAMPLE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Combine a row's blocks into the four numbers of this rank; the last two are 0 without SAMPLE."""
    nth = tl.arange(0, BLOCKS)
    here = row * blocks + nth
    peak_of = tl.load(peaks + here, mask=nth < blocks, other=-float("inf"))
    peak = tl.max(peak_of)
    total = tl.sum(tl.load(sums + here, mask=nth < blocks, other=0.0) * tl.exp2((peak_of - finite(peak)) * LOG2E))
    high = tl.full((), 0.0, tl.float32)
    low = tl.full((), 0.0, tl.float32)
    if SAMPLE:
        inv_temperature = inv_temperature_of(tl.load(temperature + row)).to(tl.float64)
        share = tl.exp2((peak_of.to(tl.float64) - finite(peak).to(tl.float64)) * inv_temperature)
        mass = tl.sum(share * tl.load(masses + here, mask=nth < blocks, other=0.0).to(tl.float64))
        high = mass.to(tl.float32)
        low = (mass - high.to(tl.float64)).to(tl.float32)
    return peak, total, high, low


@triton.jit
def owner_of(
    peak_of: tl.tensor,
    total_of: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    sample: tl.tensor,
    position: tl.tensor,
    row: tl.tensor,
    SAMPLE: tl.constexpr,
    PROCESSED: tl.constexpr,
    SHARDS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Choose the owner of a row's token from the four numbers of all ranks, `[SHARDS]` each.

    Return four values: the owner; the running sum within the owner's shard that the token must exceed; the row's
    largest logit; and the row's sum of exponentials relative to that logit, at temperature 1, or at its own with
    PROCESSED.
    """
    peak = tl.max(peak_of)
    total = tl.sum(total_of * tl.exp2((peak_of - finite(peak)) * LOG2E))
    owner = first_hit(peak_of == peak, 0, SHARDS)
    rest = tl.full((), 0.0, tl.float64)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        share = tl.exp2(
            (peak_of.to(tl.float64) - finite(peak).to(tl.float64)) * inv_temperature_of(row_temperature).to(tl.float64)
        )
        mass = share * (high.to(tl.float64) + low.to(tl.float64))
        if PROCESSED:
            _, total = at_temperature(peak, total, tl.sum(mass), inv_temperature_of(row_temperature))
        running = tl.cumsum(mass)
        target = uniform(seed + row, sample + row, position + row) * tl.max(running)
        owner = tl.where(row_temperature > 0, first_passed(mass, running, target, 0, SHARDS), owner)
        own = tl.arange(0, SHARDS) == owner
        rest = (target - tl.sum(tl.where(own, running - mass, 0.0))) / tl.sum(tl.where(own, share, 0.0))
    return owner, rest, peak, total


@triton.jit
def entry_of(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    rest: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    SAMPLE: tl.constexpr,
    PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the token's index in its owner's shard, and its log-probability."""
    random = False
    inv_temperature = inv_temperature_of(1.0)
    nth = tl.arange(0, BLOCKS)
    here = row * blocks + nth
    block_peaks = tl.load(peaks + here, mask=nth < blocks, other=-float("inf"))
    own_peak = tl.max(block_peaks)
    block = first_hit(block_peaks == own_peak, blocks - 1, BLOCKS)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        inv_temperature, random = inv_temperature_of(row_temperature), row_temperature > 0
        part = tl.exp2((block_peaks.to(tl.float64) - finite(own_peak).to(tl.float64)) * inv_temperature.to(tl.float64))
        weight = part * tl.load(masses + here, mask=nth < blocks, other=0.0).to(tl.float64)
        upto = tl.cumsum(weight)
        block = tl.where(random, first_passed(weight, upto, rest, blocks - 1, BLOCKS), block)
        at_block = nth == block
        rest = (rest - tl.sum(tl.where(at_block, upto - weight, 0.0))) / tl.sum(tl.where(at_block, part, 0.0))
    entry = tl.arange(0, BLOCK)
    at = block * BLOCK + entry
    value = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    place = first_hit(value == own_peak, 0, BLOCK)
    if SAMPLE:
        block_peak = tl.sum(tl.where(nth == block, block_peaks, 0.0))
        likely = tl.exp2((value - finite(block_peak)) * inv_temperature).to(tl.float64)
        place = tl.where(random, first_passed(likely, tl.cumsum(likely), rest, 0, BLOCK), place)
    chosen = tl.sum(tl.where(entry == place, value, 0.0)) - finite(peak)
    if SAMPLE and PROCESSED:
        chosen, _ = at_temperature(chosen, total, total, inv_temperature)
    return tl.minimum(block * BLOCK + place, vocabulary - 1), chosen - tl.log(tl.where(total == 0, 1.0, total))
