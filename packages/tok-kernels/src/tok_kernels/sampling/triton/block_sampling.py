"""Sample by inverting the CDF in two kernels: one sums each block of the logits, one selects a block and a token.

The second kernel reads the block sums and one block of each row. A row's result does not depend on the number of rows,
because blocks and the order of their sums never change. Other sampling kernels use the device functions, too.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.batch import SamplingBatch
from tok_kernels.launch_config import pdl_options

# Vocabulary entries of a block. Measured on an H200: memory bandwidth is the limit at temperatures 0 and 1. At other
# temperatures, two exponentials per entry are; replacing them by polynomials did not help.
BLOCK = 1024
_SUM_WARPS, SELECT_WARPS = 1, 1  # sums within one warp need no barrier
_TARGET_PROGRAMS = 1 << 14  # fills a GPU; with more blocks than this, a program sums several
_MAX_BLOCKS_PER_PROGRAM = 16

# Arguments whose alignment depends on the number of rows, which must not recompile the kernels.
_UNALIGNED = ["temperature", "peaks", "sums", "masses", "seed", "sample", "position", "logprob", "log_sum"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32


class BlockSums(NamedTuple):
    """Sums over each block of the logits, float32 `[R, blocks]`.

    peaks   largest logit of the block
    sums    sum of exponentials at temperature 1, relative to the peak
    masses  sum of exponentials at the row's own temperature, relative to the peak; undefined for greedy sampling
    """

    peaks: Tensor
    sums: Tensor
    masses: Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Results of sampling R rows, before filters and edits.

    token    int64   [R]
    logprob  float32 [R]  log-probability of the token at temperature 1
    log_sum  float32 [R]  natural log-sum-exp of the row at temperature 1; 0 if all logits are −inf
    blocks                the sums of the row's blocks

    If `processed`, `logprob` is taken at the row's own temperature, and `log_sum` is the log-sum-exp of
    `(logits − peak) / temperature`.
    """

    token: Tensor
    logprob: Tensor
    log_sum: Tensor
    blocks: BlockSums


@dataclass(frozen=True, slots=True)
class RandomKeys:
    """Temperature (float32) and random key (int64 seed, sample, position) of each row, `[R]`, as in `SamplingBatch`."""

    temperature: Tensor
    seed: Tensor
    sample: Tensor
    position: Tensor

    @staticmethod
    def from_batch(batch: SamplingBatch) -> RandomKeys:
        return RandomKeys(*(x.contiguous() for x in (batch.temperature, batch.seed, batch.sample, batch.position)))

    def select(self, index: Tensor) -> RandomKeys:
        """Return the keys of the rows `index`, int64."""
        return RandomKeys(
            *(x.index_select(0, index) for x in (self.temperature, self.seed, self.sample, self.position))
        )


def sample_blocks(logits_RV: Tensor, keys: RandomKeys, *, greedy: bool = False, processed: bool = False) -> SampledRows:
    """Sample each row by inverting its CDF at the row's uniform number, as the reference does.

    `logits_RV` is float32, bfloat16 or float16, contiguous along the last axis. Rows of temperature 0, and all rows if
    `greedy`, take the token with the largest logit, the first among equals. If `processed`, log-probabilities are taken
    at the rows' own temperatures.
    """
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    device = logits_RV.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    logprob, log_sum = torch.empty((2, rows), dtype=torch.float32, device=device)
    block_sums = sum_blocks(logits_RV, keys, greedy=greedy)
    if rows:
        _select_token_kernel[(rows,)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, keys.seed, keys.sample, keys.position),
            *(*block_sums, token, logprob, log_sum, vocabulary, blocks),
            SAMPLE=not greedy,
            PROCESSED=processed,
            BLOCK=BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=SELECT_WARPS,
            **pdl_options(device),
        )
    return SampledRows(token, logprob, log_sum, block_sums)


def sum_blocks(logits_RV: Tensor, keys: RandomKeys, *, greedy: bool) -> BlockSums:
    """Return the sums of all blocks of all rows."""
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    block_sums = BlockSums(*torch.empty((3, rows, blocks), dtype=torch.float32, device=logits_RV.device))
    if rows:
        blocks_per_program = max(1, min(_MAX_BLOCKS_PER_PROGRAM, rows * blocks // _TARGET_PROGRAMS))
        _sum_blocks_kernel[(rows * triton.cdiv(blocks, blocks_per_program),)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, *block_sums, vocabulary, blocks, blocks_per_program),
            SAMPLE=not greedy,
            BLOCK=BLOCK,
            num_warps=_SUM_WARPS,
            **pdl_options(logits_RV.device),
        )
    return block_sums


@triton.jit
def inverse_temperature(temperature: tl.tensor) -> tl.tensor:
    """Return log2(e) / temperature, so that exp(x / temperature) = exp2(x · result): a normal finite float32.

    Greedy rows (temperature 0) count as temperature 1.
    """
    row_temperature = tl.maximum(tl.where(temperature > 0, temperature, 1.0), TINY)
    return tl.maximum(tl.div_rn(LOG2E, row_temperature), TINY)


@triton.jit
def finite_peak(peak: tl.tensor) -> tl.tensor:
    """Replace a peak of −inf by 0, because −inf − (−inf) is NaN."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def load_masses(
    mass_ptrs: tl.tensor, present: tl.tensor, block_peaks: tl.tensor, peak: tl.tensor, inv_temperature: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Return the masses of a row's blocks relative to the row's peak, and the factors that make them so: `[BLOCKS]`.

    Both are float64, which keeps masses from underflowing, and their running sum practically exact.
    """
    factor = peak_factors(block_peaks, peak, inv_temperature)
    return factor * tl.load(mass_ptrs, mask=present, other=0.0).to(tl.float64), factor


@triton.jit
def peak_factors(peaks: tl.tensor, peak: tl.tensor, inv_temperature: tl.tensor) -> tl.tensor:
    """Return the float64 factors that make sums of exponentials relative to `peaks` relative to `peak`."""
    return tl.exp2((peaks.to(tl.float64) - finite_peak(peak).to(tl.float64)) * inv_temperature.to(tl.float64))


@triton.jit
def target_within(
    chosen: tl.tensor,
    mass: tl.tensor,
    running: tl.tensor,
    factor: tl.tensor,
    target: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Return the running sum within the chosen part of a row that its token must exceed, relative to the part's peak.

    The parts, blocks or shards, have masses of the running sum `running`; `target` is that of the whole row.
    """
    is_chosen = tl.arange(0, SIZE) == chosen
    mass_before = tl.sum(tl.where(is_chosen, running - mass, 0.0))
    return (target - mass_before) / tl.sum(tl.where(is_chosen, factor, 0.0))


@triton.jit
def scale_to_temperature(
    shifted: tl.tensor, total: tl.tensor, mass: tl.tensor, inv_temperature: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Return a logit and its row's sum of exponentials at the row's own temperature, both relative to the row's peak.

    shifted  the logit minus the peak
    total    the sum at temperature 1
    mass     the sum at the row's own temperature; not read at temperatures 0 and 1
    """
    scaled = inv_temperature != LOG2E
    logit = tl.where(scaled, shifted * (inv_temperature / LOG2E), shifted)
    return logit, tl.where(scaled, mass.to(tl.float32), total)


@triton.jit(do_not_specialize=["blocks_per_program"], do_not_specialize_on_alignment=_UNALIGNED[:4])
def _sum_blocks_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    masses: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    blocks_per_program: tl.tensor,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute the `BlockSums` of `blocks_per_program` blocks of a row.

    Grid: `(R × ⌈blocks / blocks_per_program⌉,)`, with the blocks of a row changing fastest. For each block: load BLOCK
    logits, find the peak, and sum the exponentials at temperature 1 and, with SAMPLE, at the row's own temperature.

    logits               [R, vocabulary], with `stride` between rows
    temperature          float32 [R]
    peaks, sums, masses  float32 [R, blocks], results
    PDL                  this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    programs_per_row = tl.cdiv(blocks, blocks_per_program)
    row = tl.program_id(0) // programs_per_row
    first = tl.program_id(0) % programs_per_row * blocks_per_program
    row_logits = logits + row.to(tl.int64) * stride
    inv_temperature = inverse_temperature(tl.load(temperature + row))
    lane = tl.arange(0, BLOCK)
    for block in range(first, tl.minimum(first + blocks_per_program, blocks)):
        entries = block * BLOCK + lane
        value = tl.load(row_logits + entries, mask=entries < vocabulary, other=-float("inf")).to(tl.float32)
        peak = tl.max(value)
        shifted = value - finite_peak(peak)
        total = tl.sum(tl.exp2(shifted * LOG2E))
        store_offset = row.to(tl.int64) * blocks + block
        tl.store(peaks + store_offset, peak)
        tl.store(sums + store_offset, total)
        if SAMPLE:
            block_mass = total
            if inv_temperature != LOG2E:
                block_mass = tl.sum(tl.exp2(shifted * inv_temperature))
            tl.store(masses + store_offset, block_mass)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _select_token_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    sample: tl.tensor,
    position: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    masses: tl.tensor,
    token: tl.tensor,
    logprob: tl.tensor,
    log_sum: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    SAMPLE: tl.constexpr,
    PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Select the token of one row from the sums of its blocks. Grid: `(R,)`.

    1. Combine the blocks' peaks and sums into the row's peak and sum of exponentials.
    2. Select a block: the first with the peak (greedy), or by inverting the CDF of the blocks' masses (SAMPLE).
    3. Load the block's logits, and select an entry in the same way.
    4. Store the token, its log-probability and the row's log-sum-exp, as in `SampledRows`.

    logits                      [R, vocabulary], with `stride` between rows
    temperature to position     [R], the columns of `RandomKeys`
    peaks, sums, masses         float32 [R, blocks], `BlockSums`
    token, logprob, log_sum     int64, float32 and float32 [R], results
    BLOCK, BLOCKS               entries of a block; `blocks` rounded up to a power of two
    PROCESSED                   take the log-probability at the row's own temperature
    PDL                         this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)

    # Combine the sums of the blocks, and select a block.
    block_index = tl.arange(0, BLOCKS)
    offset = row * blocks + block_index
    block_peaks = tl.load(peaks + offset, mask=block_index < blocks, other=-float("inf"))
    peak = tl.max(block_peaks)
    block_sums = tl.load(sums + offset, mask=block_index < blocks, other=0.0)
    total = tl.sum(block_sums * tl.exp2((block_peaks - finite_peak(peak)) * LOG2E))
    block = first_true(block_peaks == peak, blocks - 1, BLOCKS)
    block_target = tl.full((), 0.0, tl.float64)
    is_random = False
    inv_temperature = inverse_temperature(1.0)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        inv_temperature, is_random = inverse_temperature(row_temperature), row_temperature > 0
        block_mass, factor = load_masses(masses + offset, block_index < blocks, block_peaks, peak, inv_temperature)
        running = tl.cumsum(block_mass)
        target = uniform(seed + row, sample + row, position + row) * tl.max(running)
        sampled_block = search_cdf(block_mass, running, target, blocks - 1, BLOCKS)
        block = tl.where(is_random, sampled_block, block)
        block_target = target_within(block, block_mass, running, factor, target, BLOCKS)

    # Select an entry of the block.
    chosen_peak = tl.sum(tl.where(block_index == block, block_peaks, 0.0))
    lane = tl.arange(0, BLOCK)
    entries = block * BLOCK + lane
    value = tl.load(logits + row * stride + entries, mask=entries < vocabulary, other=-float("inf")).to(tl.float32)
    index = first_true(value == peak, 0, BLOCK)
    if SAMPLE:
        weight = tl.exp2((value - finite_peak(chosen_peak)) * inv_temperature).to(tl.float64)
        sampled_index = search_cdf(weight, tl.cumsum(weight), block_target, 0, BLOCK)
        index = tl.where(is_random, sampled_index, index)

    # Store the token, its log-probability and the log-sum-exp.
    token_logit = tl.sum(tl.where(lane == index, value, 0.0)) - finite_peak(peak)
    if SAMPLE and PROCESSED:
        token_logit, total = scale_to_temperature(token_logit, total, tl.sum(block_mass), inv_temperature)
    log_total = tl.log(tl.where(total == 0, 1.0, total))  # NaN stays NaN
    tl.store(token + row, tl.minimum(block * BLOCK + index, vocabulary - 1).to(tl.int64))
    tl.store(logprob + row, token_logit - log_total)
    tl.store(log_sum + row, log_total if PROCESSED else finite_peak(peak) + log_total)


@triton.jit
def first_true(condition: tl.tensor, default: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the index of the first true entry, or `default` if there is none."""
    first = tl.min(tl.where(condition, tl.arange(0, SIZE), SIZE))
    return tl.where(first < SIZE, first, default)


@triton.jit
def search_cdf(
    weight: tl.tensor, running: tl.tensor, target: tl.tensor, default: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Return the first entry of positive weight at which the running sum of the weights exceeds the target.

    If rounding leaves no such entry, return the last entry of positive weight, or `default` if there is none. Entries
    of weight 0 are skipped, because a parallel scan may round the running sum there above its predecessor's.
    """
    has_weight = weight > 0
    last = tl.max(tl.where(has_weight, tl.arange(0, SIZE), -1))
    return first_true(has_weight & (running > target), tl.where(last >= 0, last, default), SIZE)


@triton.jit
def uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return a row's first uniform number (`tok_kernels.sampling.reference.philox.uniforms`)."""
    first, second, _, _ = _philox_words(seed, sample, position)
    return _unit_interval(first, second)


@triton.jit
def second_uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return a row's second uniform number (`tok_kernels.sampling.reference.philox.uniforms`)."""
    _, _, third, fourth = _philox_words(seed, sample, position)
    return _unit_interval(third, fourth)


@triton.jit
def _philox_words(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, ...]:
    """Return the four 32-bit words that Philox generates from the row's key."""
    sample_word, position_word = tl.load(sample).to(tl.uint32), tl.load(position).to(tl.uint32)
    zero = sample_word & 0
    return tl.philox(tl.load(seed), sample_word, position_word, zero, zero)


@triton.jit
def _unit_interval(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """Return the float64 number in [0, 1) whose 53 bits are the upper bits of two 32-bit words."""
    return (((high >> 5).to(tl.int64) << 26) + (low >> 6).to(tl.int64)).to(tl.float64) * 1.1102230246251565e-16
