"""Define device functions that sample one row of a sharded vocabulary: sums of a rank, owner of the token, token.

`tok_kernels.sampling.reference.shards` describes the four sums that each rank sends, and the owner of a token.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tok_kernels.sampling.triton.block_sampling import (
    LOG2E,
    finite_peak,
    first_true,
    inverse_temperature,
    load_masses,
    peak_factors,
    scale_to_temperature,
    search_cdf,
    target_within,
    uniform,
)


@triton.jit
def combine_blocks(
    peaks: tl.tensor,
    sums: tl.tensor,
    masses: tl.tensor,
    temperature: tl.tensor,
    row: tl.tensor,
    blocks: tl.tensor,
    SAMPLE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Combine the sums of a row's blocks into the four sums of this rank; the last two are 0 without SAMPLE."""
    block_index = tl.arange(0, BLOCKS)
    offset = row * blocks + block_index
    block_peaks = tl.load(peaks + offset, mask=block_index < blocks, other=-float("inf"))
    peak = tl.max(block_peaks)
    block_sums = tl.load(sums + offset, mask=block_index < blocks, other=0.0)
    total = tl.sum(block_sums * tl.exp2((block_peaks - finite_peak(peak)) * LOG2E))
    mass_high = tl.full((), 0.0, tl.float32)
    mass_low = tl.full((), 0.0, tl.float32)
    if SAMPLE:
        inv_temperature = inverse_temperature(tl.load(temperature + row))
        block_mass, _ = load_masses(masses + offset, block_index < blocks, block_peaks, peak, inv_temperature)
        rank_mass = tl.sum(block_mass)
        mass_high = rank_mass.to(tl.float32)
        mass_low = (rank_mass - mass_high.to(tl.float64)).to(tl.float32)
    return peak, total, mass_high, mass_low


@triton.jit
def choose_owner(
    rank_peaks: tl.tensor,
    rank_totals: tl.tensor,
    mass_high: tl.tensor,
    mass_low: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    sample: tl.tensor,
    position: tl.tensor,
    row: tl.tensor,
    SAMPLE: tl.constexpr,
    PROCESSED: tl.constexpr,
    SHARDS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Choose the owner of a row's token from the four sums of all ranks, `[SHARDS]` each.

    Return four values:
      owner         rank whose shard holds the token
      shard_target  running sum within the owner's shard that the token must exceed, float64, relative to its peak
      peak          the row's largest logit
      total         the row's sum of exponentials relative to `peak`: at temperature 1, with PROCESSED at its own
    """
    peak = tl.max(rank_peaks)
    total = tl.sum(rank_totals * tl.exp2((rank_peaks - finite_peak(peak)) * LOG2E))
    owner = first_true(rank_peaks == peak, 0, SHARDS)
    shard_target = tl.full((), 0.0, tl.float64)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        factor = peak_factors(rank_peaks, peak, inverse_temperature(row_temperature))
        rank_mass = factor * (mass_high.to(tl.float64) + mass_low.to(tl.float64))
        if PROCESSED:
            _, total = scale_to_temperature(peak, total, tl.sum(rank_mass), inverse_temperature(row_temperature))
        running = tl.cumsum(rank_mass)
        target = uniform(seed + row, sample + row, position + row) * tl.max(running)
        owner = tl.where(row_temperature > 0, search_cdf(rank_mass, running, target, 0, SHARDS), owner)
        shard_target = target_within(owner, rank_mass, running, factor, target, SHARDS)
    return owner, shard_target, peak, total


@triton.jit
def sample_in_shard(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    shard_target: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    SAMPLE: tl.constexpr,
    PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the token's index in this rank's shard, and its log-probability; this rank is the token's owner.

    `shard_target`, `peak` and `total` are results of `choose_owner`.
    """
    is_random = False
    inv_temperature = inverse_temperature(1.0)

    # Select a block.
    block_index = tl.arange(0, BLOCKS)
    offset = row * blocks + block_index
    block_peaks = tl.load(peaks + offset, mask=block_index < blocks, other=-float("inf"))
    shard_peak = tl.max(block_peaks)
    block = first_true(block_peaks == shard_peak, blocks - 1, BLOCKS)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        inv_temperature, is_random = inverse_temperature(row_temperature), row_temperature > 0
        block_mass, factor = load_masses(
            masses + offset, block_index < blocks, block_peaks, shard_peak, inv_temperature
        )
        running = tl.cumsum(block_mass)
        block = tl.where(is_random, search_cdf(block_mass, running, shard_target, blocks - 1, BLOCKS), block)
        block_target = target_within(block, block_mass, running, factor, shard_target, BLOCKS)

    # Select an entry of the block.
    lane = tl.arange(0, BLOCK)
    entries = block * BLOCK + lane
    value = tl.load(logits + row * stride + entries, mask=entries < vocabulary, other=-float("inf")).to(tl.float32)
    index = first_true(value == shard_peak, 0, BLOCK)
    if SAMPLE:
        chosen_peak = tl.sum(tl.where(block_index == block, block_peaks, 0.0))
        weight = tl.exp2((value - finite_peak(chosen_peak)) * inv_temperature).to(tl.float64)
        index = tl.where(is_random, search_cdf(weight, tl.cumsum(weight), block_target, 0, BLOCK), index)

    # Compute its log-probability.
    token_logit = tl.sum(tl.where(lane == index, value, 0.0)) - finite_peak(peak)
    if SAMPLE and PROCESSED:
        token_logit, _ = scale_to_temperature(token_logit, total, total, inv_temperature)
    return tl.minimum(block * BLOCK + index, vocabulary - 1), token_logit - tl.log(tl.where(total == 0, 1.0, total))
