"""Check whether a row's filters keep the token sampled from the whole row, and read only the blocks needed for that.

A block whose largest entry is below the token's logit has no entry above the token. For a likely token, few blocks have
such an entry.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tok_kernels.sampling.triton.block_sampling import TINY, finite, inv_temperature_of

# Verdicts on the sampled token.
# KEPT    the filters keep the token
# ABOVE   the filters remove the token, and all tokens that they keep rank above it
# LIKELY  only min-p removes the token, so min-p alone decides which tokens are kept
# OPEN    the row has both top-k and top-p, and whether the token is kept depends on the mass of the top k, yet unknown
KEPT: tl.constexpr = tl.constexpr(0)
ABOVE: tl.constexpr = tl.constexpr(1)
LIKELY: tl.constexpr = tl.constexpr(2)
OPEN: tl.constexpr = tl.constexpr(3)

_HUGE: tl.constexpr = tl.constexpr(3.4028234663852886e38)

# Arguments whose alignment depends on the number of rows, which must not recompile the kernels.
UNALIGNED = [
    *("rows", "top_k", "top_p", "min_p", "temperature"),
    *("peaks", "masses", "token", "verdicts", "masses_above"),
]


@triton.jit
def safe_temperature_of(temperature: tl.tensor) -> tl.tensor:
    """Return the divisor of the logits, as `safe_temperature` of the reference does."""
    return tl.minimum(tl.maximum(temperature, TINY), _HUGE)


@triton.jit
def row_sums(
    peaks: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    inv_temperature: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return each block's largest logit, the row's peak, and the row's float64 sum of exponentials relative to it."""
    nth = tl.arange(0, BLOCKS)
    here = row * blocks + nth
    peak_of = tl.load(peaks + here, mask=nth < blocks, other=-float("inf"))
    peak = tl.max(peak_of)
    share = tl.exp2((peak_of.to(tl.float64) - finite(peak).to(tl.float64)) * inv_temperature.to(tl.float64))
    mass = share * tl.load(masses + here, mask=nth < blocks, other=0.0).to(tl.float64)
    return peak_of, peak, tl.sum(mass)


@triton.jit
def min_p_limit(peak: tl.tensor, safe_temperature: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Return the smallest logit that min-p keeps."""
    threshold = -float("inf")
    if min_p > 0:
        threshold = (peak.to(tl.float64) + tl.log(min_p.to(tl.float64)) * safe_temperature.to(tl.float64)).to(
            tl.float32
        )
    return threshold


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def check_filters_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    token: tl.tensor,
    verdicts: tl.tensor,
    masses_above: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Check one row with filters per program, reading GROUP blocks at a time until the verdict is certain.

    `masses_above`, for OPEN rows, is the float64 mass of the entries that rank above the token, relative to the peak.
    Reading stops, and the mass is incomplete, once it suffices to remove the token.
    """
    nth_row = tl.program_id(0)
    row = tl.load(rows + nth_row).to(tl.int64)
    k, p, ratio = tl.load(top_k + nth_row), tl.load(top_p + nth_row), tl.load(min_p + nth_row)
    row_temperature = tl.load(temperature + row)
    safe_temperature, inv_temperature = safe_temperature_of(row_temperature), inv_temperature_of(row_temperature)
    peak_of, peak, total = row_sums(peaks, masses, row, inv_temperature, blocks, BLOCKS)
    verdict = KEPT
    if (row_temperature > 0) & (peak > -float("inf")) & ((k > 0) | (p < 1) | (ratio > 0)):
        line = logits + row * stride
        chosen = tl.load(token + row)
        own = tl.load(line + chosen).to(tl.float32)
        own_mass = tl.exp2((own - peak) * inv_temperature).to(tl.float64)
        nth, entry = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
        number = tl.full((), 0, tl.int32)
        before = tl.full((), 0.0, tl.float64)
        removed = False
        first = tl.min(tl.where(peak_of >= own, nth, BLOCKS))
        while (first < blocks) & (removed == 0):
            block = first + tl.arange(0, GROUP)
            reaches = tl.load(peaks + row * blocks + block, mask=block < blocks, other=-float("inf")) >= own
            at = block[:, None] * BLOCK + entry[None, :]
            x = tl.load(line + at, mask=reaches[:, None] & (at < vocabulary), other=-float("inf")).to(tl.float32)
            above = x > own
            equal = tl.sum(((x == own) & (at < chosen)).to(tl.int32))
            number += tl.sum(above.to(tl.int32))
            mass = tl.sum(tl.where(above, tl.exp2((x - peak) * inv_temperature), 0.0), axis=1)
            before += tl.sum(mass.to(tl.float64)) + equal * own_mass
            removed = ((k > 0) & (number >= k)) | ((p < 1) & (before > 0) & (before >= p * total))
            first = tl.min(tl.where((peak_of >= own) & (nth >= first + GROUP), nth, BLOCKS))
        # The token and the entries above it are among the top k, so the mass of the top k is no less than theirs.
        least_mass = tl.where(k > 0, before + own_mass, total)
        if removed:
            verdict = tl.where((k > 0) & (number < k), OPEN, ABOVE)
        elif (p < 1) & (before > 0) & (before >= p * least_mass):
            verdict = OPEN
        elif own < min_p_limit(peak, safe_temperature, ratio):
            verdict = LIKELY
        tl.store(masses_above + nth_row, before)
    tl.store(verdicts + nth_row, verdict)
