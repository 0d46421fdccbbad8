"""Sample in two kernels: one pass over the logits sums each block; the second finds a row's block and token.

The second kernel reads one block of each row again and nothing else of the logits. What a row gets depends on
the row alone, not on how many there are: blocks and the order of their sums never change.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import SamplingBatch

# Measured on an H200. One warp a program: the sums need no barrier. At temperature 1 and 0 the memory is the
# limit; at others two exponentials an entry are, which polynomials in place of some of them did not relieve.
BLOCK = 1024
_SUM_WARPS, PICK_WARPS = 1, 1
_PROGRAMS = 1 << 14  # enough to fill a GPU: from there on a program takes several blocks
_MAX_PROGRAM_BLOCKS = 16

# Where these begin depends on the number of rows, which must not compile the kernels anew.
_UNALIGNED = ["temperature", "peaks", "sums", "masses", "seed", "sample", "position", "logprob", "log_sum"]

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a row gets: `token` int64, its `logprob` and the natural `log_sum` of the row's exponentials, both
    float32 and both at temperature 1; all `[R]`. `sums`: what `sum_blocks` found.

    The `log_sum` of a row that is −inf everywhere is 0.
    """

    token: Tensor
    logprob: Tensor
    log_sum: Tensor
    sums: Tensor


@dataclass(frozen=True, slots=True)
class RandomKeys:
    """Temperature float32 and randomness int64 of each row, `[R]`, as in `tok_kernels.SamplingBatch`."""

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
    """Inverts the cumulative distribution of each row at its uniform number, as the reference does.

    `logits_RV` float32, bfloat16 or float16 with a dense last axis. Rows of temperature 0, and all with
    `greedy`, take their largest logit, the first of equals.
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
            DRAW=not greedy,
            BLOCK=BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=PICK_WARPS,
        )
    return SampledRows(token, logprob, log_sum, sums)


def sum_blocks(logits_RV: Tensor, keys: RandomKeys, *, greedy: bool) -> Tensor:
    """What `_sum_blocks` finds of every block: float32 `[3, R, blocks]`, the last of them undefined if `greedy`."""
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    sums = torch.empty((3, rows, blocks), dtype=torch.float32, device=logits_RV.device)
    if rows:
        each = max(1, min(_MAX_PROGRAM_BLOCKS, rows * blocks // _PROGRAMS))
        _sum_blocks[(rows * triton.cdiv(blocks, each),)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, *sums, vocabulary, blocks, each),
            DRAW=not greedy,
            BLOCK=BLOCK,
            num_warps=_SUM_WARPS,
        )
    return sums


@triton.jit
def _slope(temperature: tl.tensor) -> tl.tensor:
    """What a difference of logits is multiplied by to be an exponent of 2; never infinite, never denormal."""
    heat = tl.maximum(tl.where(temperature > 0, temperature, 1.0), _TINY)
    return tl.maximum(tl.div_rn(_LOG2E, heat), _TINY)


@triton.jit
def _finite(peak: tl.tensor) -> tl.tensor:
    """Stands in for the largest of nothing but −inf, so that −inf is subtracted from no −inf."""
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
    DRAW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Of `each` blocks of a row: the largest logit, and relative to it the sum of exponentials at temperature
    1 (`sums`) and at the row's own (`masses`)."""
    programs = tl.cdiv(blocks, each)
    row = tl.program_id(0) // programs
    first = tl.program_id(0) % programs * each
    line = logits + row.to(tl.int64) * stride
    slope = _slope(tl.load(temperature + row))
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
        if DRAW:
            mass = total
            if slope != _LOG2E:
                mass = tl.sum(tl.exp2(below * slope))
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
    DRAW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Combines a row's blocks, chooses one, and an entry of it."""
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCKS)
    here = row * blocks + nth
    peak_of = tl.load(peaks + here, mask=nth < blocks, other=-float("inf"))
    peak = tl.max(peak_of)
    total = tl.sum(tl.load(sums + here, mask=nth < blocks, other=0.0) * tl.exp2((peak_of - _finite(peak)) * _LOG2E))
    block = _first(peak_of == peak, blocks - 1, BLOCKS)
    rest = tl.full((), 0.0, tl.float64)
    drawn = False
    slope = _slope(1.0)
    if DRAW:
        heat = tl.load(temperature + row)
        slope, drawn = _slope(heat), heat > 0
        # Relative to the row's peak in float64: no mass is lost to underflow, and the running sum is as good as
        # exact.
        share = tl.exp2((peak_of.to(tl.float64) - _finite(peak).to(tl.float64)) * slope.to(tl.float64))
        mass = share * tl.load(masses + here, mask=nth < blocks, other=0.0).to(tl.float64)
        running = tl.cumsum(mass)
        target = _uniform(seed + row, sample + row, position + row) * tl.max(running)
        passed = _first_passed(mass, running, target, blocks - 1, BLOCKS)
        block = tl.where(drawn, passed, block)
        chosen = nth == block
        rest = (target - tl.sum(tl.where(chosen, running - mass, 0.0))) / tl.sum(tl.where(chosen, share, 0.0))
    block_peak = tl.sum(tl.where(nth == block, peak_of, 0.0))
    entry = tl.arange(0, BLOCK)
    at = block * BLOCK + entry
    value = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    found = _first(value == peak, 0, BLOCK)
    if DRAW:
        weight = tl.exp2((value - _finite(block_peak)) * slope).to(tl.float64)
        inside = _first_passed(weight, tl.cumsum(weight), rest, 0, BLOCK)
        found = tl.where(drawn, inside, found)
    own = tl.sum(tl.where(entry == found, value, 0.0)) - _finite(peak)
    log_total = tl.log(tl.where(total == 0, 1.0, total))  # NaN stays NaN
    tl.store(token + row, tl.minimum(block * BLOCK + found, vocabulary - 1).to(tl.int64))
    tl.store(logprob + row, own - log_total)
    tl.store(log_sum + row, _finite(peak) + log_total)


@triton.jit
def _first(hit: tl.tensor, otherwise: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The index of the first hit, or `otherwise`."""
    index = tl.min(tl.where(hit, tl.arange(0, SIZE), SIZE))
    return tl.where(index < SIZE, index, otherwise)


@triton.jit
def _first_passed(
    weight: tl.tensor, running: tl.tensor, target: tl.tensor, otherwise: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Where the running sum passes the target; rounding may let no entry do so: then the last of any weight.

    A parallel scan may round an entry of weight 0 above its predecessor: it must not be hit.
    """
    possible = weight > 0
    last = tl.max(tl.where(possible, tl.arange(0, SIZE), -1))
    return _first(possible & (running > target), tl.where(last >= 0, last, otherwise), SIZE)


@triton.jit
def _uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The first of `tok_kernels.sampling.reference.philox.uniforms`: float64 in [0, 1) with 53 random bits."""
    first, second, _, _ = _words(seed, sample, position)
    return _unit(first, second)


@triton.jit
def _second_uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The second of them."""
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
