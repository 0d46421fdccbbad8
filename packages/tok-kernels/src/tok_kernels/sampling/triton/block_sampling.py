"""Sample in two kernels: one pass over the logits sums each block; the second finds a row's block and token.

The second kernel rereads one block of each row and nothing else of the logits. A row's result depends on the row alone,
not on the number of rows: blocks and the order of their sums never change.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import SamplingBatch

# Measured on an H200. With one warp per program the sums need no barrier. At temperatures 1 and 0 memory bandwidth is
# the limit. At others it is two exponentials per entry; replacing some of them by polynomials did not help.
BLOCK = 1024
_SUM_WARPS, PICK_WARPS = 1, 1
_PROGRAMS = 1 << 14  # enough to fill a GPU; with more blocks than this, a program takes several
_MAX_PROGRAM_BLOCKS = 16

# The alignment of these depends on the number of rows, which must not recompile the kernels.
_UNALIGNED = ["temperature", "peaks", "sums", "masses", "seed", "sample", "position", "logprob", "log_sum"]

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Results of sampling R rows.

    token    int64   [R]
    logprob  float32 [R]             the token's log-probability at temperature 1
    log_sum  float32 [R]             natural log-sum-exp of the row at temperature 1; 0 if all logits are −inf
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


def sample_blocks(logits_RV: Tensor, keys: RandomKeys, *, greedy: bool = False) -> SampledRows:
    """Sample each row by inverting its cumulative distribution at its uniform number, as the reference does.

    `logits_RV` is float32, bfloat16 or float16 with a dense last axis. Rows of temperature 0, and all rows with
    `greedy`, take their largest logit, the first among equals.
    """
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    device = logits_RV.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    logprob, log_sum = torch.empty((2, rows), dtype=torch.float32, device=device)
    sums = sum_blocks(logits_RV, keys, greedy=greedy)
    if rows:
        _pick[(rows,)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, keys.seed, keys.sample, keys.position),
            *(*sums, token, logprob, log_sum, vocabulary, blocks),
            SAMPLE=not greedy,
            BLOCK=BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=PICK_WARPS,
        )
    return SampledRows(token, logprob, log_sum, sums)


def sum_blocks(logits_RV: Tensor, keys: RandomKeys, *, greedy: bool) -> Tensor:
    """Return the results of `_sum_blocks` for every block: peaks, sums and masses, float32 `[3, R, blocks]`.

    The masses are undefined with `greedy`.
    """
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    sums = torch.empty((3, rows, blocks), dtype=torch.float32, device=logits_RV.device)
    if rows:
        each = max(1, min(_MAX_PROGRAM_BLOCKS, rows * blocks // _PROGRAMS))
        _sum_blocks[(rows * triton.cdiv(blocks, each),)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, *sums, vocabulary, blocks, each),
            SAMPLE=not greedy,
            BLOCK=BLOCK,
            num_warps=_SUM_WARPS,
        )
    return sums


@triton.jit
def _inv_temperature(temperature: tl.tensor) -> tl.tensor:
    """Return the factor that turns a difference of logits into an exponent of 2; never infinite, never denormal."""
    row_temperature = tl.maximum(tl.where(temperature > 0, temperature, 1.0), _TINY)
    return tl.maximum(tl.div_rn(_LOG2E, row_temperature), _TINY)


@triton.jit
def _finite(peak: tl.tensor) -> tl.tensor:
    """Replace a peak of −inf by 0, so that −inf is never subtracted from −inf."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit(do_not_specialize=["each"], do_not_specialize_on_alignment=_UNALIGNED[:4])
def _sum_blocks(
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
) -> None:
    """Compute for each of `each` blocks of a row the largest logit (`peaks`) and sums of exponentials relative to it.

    `sums` is the sum at temperature 1, and `masses` the sum at the row's own temperature.
    """
    programs = tl.cdiv(blocks, each)
    row = tl.program_id(0) // programs
    first = tl.program_id(0) % programs * each
    line = logits + row.to(tl.int64) * stride
    inv_temperature = _inv_temperature(tl.load(temperature + row))
    entry = tl.arange(0, BLOCK)
    for block in range(first, tl.minimum(first + each, blocks)):
        at = block * BLOCK + entry
        value = tl.load(line + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        peak = tl.max(value)
        below = value - _finite(peak)
        total = tl.sum(tl.exp2(below * _LOG2E))
        to = row.to(tl.int64) * blocks + block
        tl.store(peaks + to, peak)
        tl.store(sums + to, total)
        if SAMPLE:
            mass = total
            if inv_temperature != _LOG2E:
                mass = tl.sum(tl.exp2(below * inv_temperature))
            tl.store(masses + to, mass)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _pick(
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
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Combine a row's blocks, choose one of them, and choose an entry of it."""
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCKS)
    here = row * blocks + nth
    peak_of = tl.load(peaks + here, mask=nth < blocks, other=-float("inf"))
    peak = tl.max(peak_of)
    total = tl.sum(tl.load(sums + here, mask=nth < blocks, other=0.0) * tl.exp2((peak_of - _finite(peak)) * _LOG2E))
    block = _first(peak_of == peak, blocks - 1, BLOCKS)
    rest = tl.full((), 0.0, tl.float64)
    random = False
    inv_temperature = _inv_temperature(1.0)
    if SAMPLE:
        row_temperature = tl.load(temperature + row)
        inv_temperature, random = _inv_temperature(row_temperature), row_temperature > 0
        # float64, relative to the row's peak: no mass is lost to underflow, and the running sum is practically exact.
        share = tl.exp2((peak_of.to(tl.float64) - _finite(peak).to(tl.float64)) * inv_temperature.to(tl.float64))
        mass = share * tl.load(masses + here, mask=nth < blocks, other=0.0).to(tl.float64)
        running = tl.cumsum(mass)
        target = _uniform(seed + row, sample + row, position + row) * tl.max(running)
        passed = _first_passed(mass, running, target, blocks - 1, BLOCKS)
        block = tl.where(random, passed, block)
        chosen = nth == block
        rest = (target - tl.sum(tl.where(chosen, running - mass, 0.0))) / tl.sum(tl.where(chosen, share, 0.0))
    block_peak = tl.sum(tl.where(nth == block, peak_of, 0.0))
    entry = tl.arange(0, BLOCK)
    at = block * BLOCK + entry
    value = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    found = _first(value == peak, 0, BLOCK)
    if SAMPLE:
        weight = tl.exp2((value - _finite(block_peak)) * inv_temperature).to(tl.float64)
        inside = _first_passed(weight, tl.cumsum(weight), rest, 0, BLOCK)
        found = tl.where(random, inside, found)
    own = tl.sum(tl.where(entry == found, value, 0.0)) - _finite(peak)
    log_total = tl.log(tl.where(total == 0, 1.0, total))  # NaN stays NaN
    tl.store(token + row, tl.minimum(block * BLOCK + found, vocabulary - 1).to(tl.int64))
    tl.store(logprob + row, own - log_total)
    tl.store(log_sum + row, _finite(peak) + log_total)


@triton.jit
def _first(hit: tl.tensor, otherwise: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the index of the first hit, or `otherwise`."""
    index = tl.min(tl.where(hit, tl.arange(0, SIZE), SIZE))
    return tl.where(index < SIZE, index, otherwise)


@triton.jit
def _first_passed(
    weight: tl.tensor, running: tl.tensor, target: tl.tensor, otherwise: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Return the first entry at which the running sum exceeds the target.

    If rounding lets no entry do so, return the last entry of any weight, or `otherwise`. A parallel scan may round the
    running sum at an entry of weight 0 above its predecessor's; such an entry must not be returned.
    """
    possible = weight > 0
    last = tl.max(tl.where(possible, tl.arange(0, SIZE), -1))
    return _first(possible & (running > target), tl.where(last >= 0, last, otherwise), SIZE)


@triton.jit
def _uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the first of `tok_kernels.sampling.reference.philox.uniforms`: float64 in [0, 1) with 53 random bits."""
    first, second, _, _ = _words(seed, sample, position)
    return _unit(first, second)


@triton.jit
def _second_uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the second of these numbers."""
    _, _, third, fourth = _words(seed, sample, position)
    return _unit(third, fourth)


@triton.jit
def _words(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, ...]:
    number, place = tl.load(sample).to(tl.uint32), tl.load(position).to(tl.uint32)
    zero = number & 0
    return tl.philox(tl.load(seed), number, place, zero, zero)


@triton.jit
def _unit(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    return (((high >> 5).to(tl.int64) << 26) + (low >> 6).to(tl.int64)).to(tl.float64) * 1.1102230246251565e-16
