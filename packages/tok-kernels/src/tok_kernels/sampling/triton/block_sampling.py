"""Sample in two kernels: the first sums each block of the logits; the second finds a row's block and token.

The second kernel rereads only one block of each row. A row's result does not depend on the number of rows, because
blocks and the order of their sums never change. The device functions in this module serve the other sampling kernels
too.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.batch import SamplingBatch
from tok_kernels.launch_config import pdl_options

# Measured on an H200. With one warp per program, the sums need no barrier. At temperatures 0 and 1, memory bandwidth is
# the limit. At other temperatures, the limit is two exponentials per entry; polynomials in their place did not help.
BLOCK = 1024
_SUM_WARPS, PICK_WARPS = 1, 1
_PROGRAMS = 1 << 14  # enough to fill a GPU; with more blocks than this, a program takes several
_MAX_PROGRAM_BLOCKS = 16

# Arguments whose alignment depends on the number of rows, which must not recompile the kernels.
_UNALIGNED = ["temperature", "peaks", "sums", "masses", "seed", "sample", "position", "logprob", "log_sum"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Results of sampling R rows, before filters and edits.

    token    int64   [R]
    logprob  float32 [R]             log-probability of the token at temperature 1
    log_sum  float32 [R]             natural log-sum-exp of the row at temperature 1; 0 if all logits are −inf
                                     processed: that of (row − its peak) / its temperature
    sums     float32 [3, R, blocks]  the result of `sum_blocks`
    """

    token: Tensor
    logprob: Tensor
    log_sum: Tensor
    sums: Tensor


@dataclass(frozen=True, slots=True)
class RandomKeys:
    """Temperature (float32) and random key (int64) of each row, `[R]`, as in `tok_kernels.SamplingBatch`."""

    temperature: Tensor
    seed: Tensor
    sample: Tensor
    position: Tensor

    @staticmethod
    def of(batch: SamplingBatch) -> RandomKeys:
        return RandomKeys(*(x.contiguous() for x in (batch.temperature, batch.seed, batch.sample, batch.position)))

    def rows(self, index: Tensor) -> RandomKeys:
        return RandomKeys(
            *(x.index_select(0, index) for x in (self.temperature, self.seed, self.sample, self.position))
        )


def sample_blocks(logits_RV: Tensor, keys: RandomKeys, *, greedy: bool = False, processed: bool = False) -> SampledRows:
    """Sample each row by inverting its cumulative distribution at its uniform number, as the reference does.

    `logits_RV` is float32, bfloat16 or float16 with a dense last axis. Rows of temperature 0, and all rows if `greedy`,
    take the token with the largest logit, the first among equals. If `processed`, log-probabilities are taken at the
    rows' own temperatures.
    """
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    device = logits_RV.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    logprob, log_sum = torch.empty((2, rows), dtype=torch.float32, device=device)
    sums = sum_blocks(logits_RV, keys, greedy=greedy)
    if rows:
        _pick_token_kernel[(rows,)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, keys.seed, keys.sample, keys.position),
            *(*sums, token, logprob, log_sum, vocabulary, blocks),
            SAMPLE=not greedy,
            PROCESSED=processed,
            BLOCK=BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=PICK_WARPS,
            **pdl_options(device),
        )
    return SampledRows(token, logprob, log_sum, sums)


def sum_blocks(logits_RV: Tensor, keys: RandomKeys, *, greedy: bool) -> Tensor:
    """Return the peaks, sums and masses of all blocks (`_sum_blocks_kernel`), float32 `[3, R, blocks]`.

    The masses are undefined if `greedy`.
    """
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    sums = torch.empty((3, rows, blocks), dtype=torch.float32, device=logits_RV.device)
    if rows:
        each = max(1, min(_MAX_PROGRAM_BLOCKS, rows * blocks // _PROGRAMS))
        _sum_blocks_kernel[(rows * triton.cdiv(blocks, each),)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, *sums, vocabulary, blocks, each),
            SAMPLE=not greedy,
            BLOCK=BLOCK,
            num_warps=_SUM_WARPS,
            **pdl_options(logits_RV.device),
        )
    return sums


@triton.jit
def inv_temperature_of(temperature: tl.tensor) -> tl.tensor:
    """Return the factor that turns a difference of logits into an exponent of 2, a normal finite number."""
    row_temperature = tl.maximum(tl.where(temperature > 0, temperature, 1.0), TINY)
    return tl.maximum(tl.div_rn(LOG2E, row_temperature), TINY)


@triton.jit
def finite(peak: tl.tensor) -> tl.tensor:
    """Replace peaks of −inf by 0, so that −inf is never subtracted from −inf."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def at_temperature(
    below: tl.tensor, total: tl.tensor, mass: tl.tensor, inv_temperature: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Return a logit relative to its row's peak, and the sum of exponentials, at the row's own temperature.

    `total` is that sum at temperature 1, and `mass` at the row's own; rows of temperatures 0 and 1 get `total`.
    """
    own = inv_temperature != LOG2E
    return tl.where(own, below * (inv_temperature / LOG2E), below), tl.where(own, mass.to(tl.float32), total)


@triton.jit(do_not_specialize=["each"], do_not_specialize_on_alignment=_UNALIGNED[:4])
def _sum_blocks_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    masses: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    each: tl.tensor,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute three numbers for each of `each` blocks of a row.

    peaks   largest logit of the block
    sums    sum of exponentials at temperature 1, relative to the peak
    masses  sum of exponentials at the row's own temperature, relative to the peak; only with SAMPLE
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    programs = tl.cdiv(blocks, each)
    row = tl.program_id(0) // programs
    first = tl.program_id(0) % programs * each
    line = logits + row.to(tl.int64) * stride
    inv_temperature = inv_temperature_of(tl.load(temperature + row))
    entry = tl.arange(0, BLOCK)
    for block in range(first, tl.minimum(first + each, blocks)):
        at = block * BLOCK + entry
        value = tl.load(line + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        peak = tl.max(value)
        below = value - finite(peak)
        total = tl.sum(tl.exp2(below * LOG2E))
        to = row.to(tl.int64) * blocks + block
        tl.store(peaks + to, peak)
        tl.store(sums + to, total)
        if SAMPLE:
            mass = total
            if inv_temperature != LOG2E:
                mass = tl.sum(tl.exp2(below * inv_temperature))
            tl.store(masses + to, mass)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _pick_token_kernel(
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
    """Combine the blocks of a row, choose one of them, and choose an entry of that block."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCKS)
    here = row * blocks + nth
    peak_of = tl.load(peaks + here, mask=nth < blocks, other=-float("inf"))
    peak = tl.max(peak_of)
    total = tl.sum(tl.load(sums + here, mask=nth < blocks, other=0.0) * tl.exp2((peak_of - finite(peak)) * LOG2E))
    block = first_hit(peak_of == peak, blocks - 1, BLOCKS)
    rest = tl.full((), 0.0, tl.float64)
    random = False
    inv_temperature = inv_temperature_of(1.0)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        inv_temperature, random = inv_temperature_of(row_temperature), row_temperature > 0
        # In float64, relative to the row's peak, no mass underflows, and the running sum is practically exact.
        share = tl.exp2((peak_of.to(tl.float64) - finite(peak).to(tl.float64)) * inv_temperature.to(tl.float64))
        mass = share * tl.load(masses + here, mask=nth < blocks, other=0.0).to(tl.float64)
        running = tl.cumsum(mass)
        target = uniform(seed + row, sample + row, position + row) * tl.max(running)
        passed = first_passed(mass, running, target, blocks - 1, BLOCKS)
        block = tl.where(random, passed, block)
        chosen = nth == block
        rest = (target - tl.sum(tl.where(chosen, running - mass, 0.0))) / tl.sum(tl.where(chosen, share, 0.0))
    block_peak = tl.sum(tl.where(nth == block, peak_of, 0.0))
    entry = tl.arange(0, BLOCK)
    at = block * BLOCK + entry
    value = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    found = first_hit(value == peak, 0, BLOCK)
    if SAMPLE:
        weight = tl.exp2((value - finite(block_peak)) * inv_temperature).to(tl.float64)
        inside = first_passed(weight, tl.cumsum(weight), rest, 0, BLOCK)
        found = tl.where(random, inside, found)
    own = tl.sum(tl.where(entry == found, value, 0.0)) - finite(peak)
    if SAMPLE and PROCESSED:
        own, total = at_temperature(own, total, tl.sum(mass), inv_temperature)
    log_total = tl.log(tl.where(total == 0, 1.0, total))  # NaN stays NaN
    tl.store(token + row, tl.minimum(block * BLOCK + found, vocabulary - 1).to(tl.int64))
    tl.store(logprob + row, own - log_total)
    tl.store(log_sum + row, log_total if PROCESSED else finite(peak) + log_total)


@triton.jit
def first_hit(hit: tl.tensor, otherwise: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the index of the first hit, or `otherwise` if there is none."""
    index = tl.min(tl.where(hit, tl.arange(0, SIZE), SIZE))
    return tl.where(index < SIZE, index, otherwise)


@triton.jit
def first_passed(
    weight: tl.tensor, running: tl.tensor, target: tl.tensor, otherwise: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Return the first entry at which the running sum exceeds the target.

    If rounding leaves no such entry, return the last entry with any weight, or `otherwise`. A parallel scan may round
    the running sum at an entry of weight 0 above its predecessor's; such an entry must not be returned.
    """
    possible = weight > 0
    last = tl.max(tl.where(possible, tl.arange(0, SIZE), -1))
    return first_hit(possible & (running > target), tl.where(last >= 0, last, otherwise), SIZE)


@triton.jit
def uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the first number of `tok_kernels.sampling.reference.philox.uniforms` for one row."""
    first, second, _, _ = _words(seed, sample, position)
    return _unit(first, second)


@triton.jit
def second_uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the second number of `tok_kernels.sampling.reference.philox.uniforms` for one row."""
    _, _, third, fourth = _words(seed, sample, position)
    return _unit(third, fourth)


@triton.jit
def _words(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, ...]:
    """Return four random 32-bit words of the row's key."""
    number, place = tl.load(sample).to(tl.uint32), tl.load(position).to(tl.uint32)
    zero = number & 0
    return tl.philox(tl.load(seed), number, place, zero, zero)


@triton.jit
def _unit(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    return (((high >> 5).to(tl.int64) << 26) + (low >> 6).to(tl.int64)).to(tl.float64) * 1.1102230246251565e-16
