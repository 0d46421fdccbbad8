"""Device functions for sampling from a sharded vocabulary, one row each: local sums, owning rank, token.

`tok_kernels.sampling.reference.shards` describes what the ranks send each other.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tok_kernels.sampling.triton.block_sampling import (
    _LOG2E,
    _finite,
    _first,
    _first_passed,
    _inv_temperature,
    _uniform,
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
    """Combine a row's blocks into the four numbers of this rank; the last two are 0 without DRAW."""
    nth = tl.arange(0, BLOCKS)
    here = row * blocks + nth
    peak_of = tl.load(peaks + here, mask=nth < blocks, other=-float("inf"))
    peak = tl.max(peak_of)
    total = tl.sum(tl.load(sums + here, mask=nth < blocks, other=0.0) * tl.exp2((peak_of - _finite(peak)) * _LOG2E))
    high = tl.full((), 0.0, tl.float32)
    low = tl.full((), 0.0, tl.float32)
    if SAMPLE:
        inv_temperature = _inv_temperature(tl.load(temperature + row)).to(tl.float64)
        share = tl.exp2((peak_of.to(tl.float64) - _finite(peak).to(tl.float64)) * inv_temperature)
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
    SHARDS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Choose the rank that has a row's token, from the four numbers of all ranks, `[SHARDS]` each.

    Returns four values: that rank; the running sum that must be exceeded within it to find the token; the row's largest
    logit; and the row's sum of exponentials relative to it.
    """
    peak = tl.max(peak_of)
    total = tl.sum(total_of * tl.exp2((peak_of - _finite(peak)) * _LOG2E))
    owner = _first(peak_of == peak, 0, SHARDS)
    rest = tl.full((), 0.0, tl.float64)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        share = tl.exp2(
            (peak_of.to(tl.float64) - _finite(peak).to(tl.float64)) * _inv_temperature(row_temperature).to(tl.float64)
        )
        mass = share * (high.to(tl.float64) + low.to(tl.float64))
        running = tl.cumsum(mass)
        target = _uniform(seed + row, sample + row, position + row) * tl.max(running)
        owner = tl.where(row_temperature > 0, _first_passed(mass, running, target, 0, SHARDS), owner)
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
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return a token's index in the shard of the rank that has it, and its log-probability."""
    random = False
    inv_temperature = _inv_temperature(1.0)
    nth = tl.arange(0, BLOCKS)
    here = row * blocks + nth
    block_peaks = tl.load(peaks + here, mask=nth < blocks, other=-float("inf"))
    own_peak = tl.max(block_peaks)
    block = _first(block_peaks == own_peak, blocks - 1, BLOCKS)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        inv_temperature, random = _inv_temperature(row_temperature), row_temperature > 0
        part = tl.exp2((block_peaks.to(tl.float64) - _finite(own_peak).to(tl.float64)) * inv_temperature.to(tl.float64))
        weight = part * tl.load(masses + here, mask=nth < blocks, other=0.0).to(tl.float64)
        upto = tl.cumsum(weight)
        block = tl.where(random, _first_passed(weight, upto, rest, blocks - 1, BLOCKS), block)
        at_block = nth == block
        rest = (rest - tl.sum(tl.where(at_block, upto - weight, 0.0))) / tl.sum(tl.where(at_block, part, 0.0))
    entry = tl.arange(0, BLOCK)
    at = block * BLOCK + entry
    value = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    place = _first(value == own_peak, 0, BLOCK)
    if SAMPLE:
        block_peak = tl.sum(tl.where(nth == block, block_peaks, 0.0))
        likely = tl.exp2((value - _finite(block_peak)) * inv_temperature).to(tl.float64)
        place = tl.where(random, _first_passed(likely, tl.cumsum(likely), rest, 0, BLOCK), place)
    chosen = tl.sum(tl.where(entry == place, value, 0.0)) - _finite(peak)
    return tl.minimum(block * BLOCK + place, vocabulary - 1), chosen - tl.log(tl.where(total == 0, 1.0, total))
