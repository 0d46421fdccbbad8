"""Check whether top-k, top-p and min-p keep the token that was sampled from the whole row.

Only entries that rank above the token matter. A block is read only if its peak is not below the token's logit, so few
blocks are read for a likely token.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tok_kernels.sampling.triton.block_sampling import TINY, inverse_temperature, load_masses

# Verdicts on the sampled token:
#   KEPT        the filters keep the token
#   REMOVED     top-k or top-p removes the token; all kept tokens rank above it
#   MIN_P_ONLY  min-p alone removes the token, so min-p alone decides which tokens are kept
#   UNDECIDED   the row has top-k and top-p, and top-p depends on the mass of the top k, which this kernel does not sum
KEPT: tl.constexpr = tl.constexpr(0)
REMOVED: tl.constexpr = tl.constexpr(1)
MIN_P_ONLY: tl.constexpr = tl.constexpr(2)
UNDECIDED: tl.constexpr = tl.constexpr(3)

_MAX_FLOAT32: tl.constexpr = tl.constexpr(3.4028234663852886e38)

# Arguments whose alignment depends on the number of rows, which must not recompile the kernels.
UNALIGNED = [
    *("rows", "top_k", "top_p", "min_p", "temperature"),
    *("peaks", "masses", "token", "verdicts", "masses_above"),
]


@triton.jit
def safe_temperature_of(temperature: tl.tensor) -> tl.tensor:
    """Return the divisor of the logits: the temperature, clamped to normal finite float32 numbers."""
    return tl.minimum(tl.maximum(temperature, TINY), _MAX_FLOAT32)


@triton.jit
def combine_masses(
    peaks: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    inv_temperature: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the peaks of a row's blocks, the row's peak, and its float64 sum of exponentials relative to that peak."""
    block_index = tl.arange(0, BLOCKS)
    offset = row * blocks + block_index
    block_peaks = tl.load(peaks + offset, mask=block_index < blocks, other=-float("inf"))
    peak = tl.max(block_peaks)
    block_mass, _ = load_masses(masses + offset, block_index < blocks, block_peaks, peak, inv_temperature)
    return block_peaks, peak, tl.sum(block_mass)


@triton.jit
def min_p_limit(peak: tl.tensor, safe_temperature: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Return the smallest logit that min-p keeps; −inf if `min_p` is 0."""
    threshold = -float("inf")
    if min_p > 0:
        peak_f64 = peak.to(tl.float64)
        threshold = (peak_f64 + tl.log(min_p.to(tl.float64)) * safe_temperature.to(tl.float64)).to(tl.float32)
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
    """Store the verdict on the sampled token of one row with filters. Grid: `(r,)`.

    1. Combine the sums of the row's blocks into its peak and its mass at the row's temperature.
    2. Read the blocks whose peak is not below the token's logit, GROUP at a time. Count the entries that rank above the
       token, and sum their mass. Entries of equal logit rank by id.
    3. Stop as soon as the count or the mass removes the token from the top-k, or from the top-p of all entries.
    4. Derive the verdict from count, mass and the threshold of min-p.

    logits                     [R, vocabulary], with `stride` between rows
    rows, top_k, top_p, min_p  [r], the columns of `Filters`
    temperature                float32 [R]
    peaks, masses              float32 [R, blocks], of `BlockSums`
    token                      int64 [R], the sampled tokens
    verdicts                   int32 [r], result
    masses_above               float64 [r], result for UNDECIDED rows: mass of the entries that rank above the token,
                               relative to the row's peak; incomplete if step 3 stopped the count
    BLOCK, BLOCKS              entries of a block; `blocks` rounded up to a power of two
    """
    filtered_row = tl.program_id(0)
    row = tl.load(rows + filtered_row).to(tl.int64)
    k, p, min_p_row = tl.load(top_k + filtered_row), tl.load(top_p + filtered_row), tl.load(min_p + filtered_row)
    row_temperature = tl.load(temperature + row)
    safe_temperature, inv_temperature = safe_temperature_of(row_temperature), inverse_temperature(row_temperature)
    block_peaks, peak, total = combine_masses(peaks, masses, row, inv_temperature, blocks, BLOCKS)
    verdict = KEPT
    if (row_temperature > 0) & (peak > -float("inf")) & ((k > 0) | (p < 1) | (min_p_row > 0)):
        row_logits = logits + row * stride
        token_id = tl.load(token + row)
        token_logit = tl.load(row_logits + token_id).to(tl.float32)
        token_mass = tl.exp2((token_logit - peak) * inv_temperature).to(tl.float64)

        # Count the entries above the token, and sum their mass.
        block_index, lane = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
        count_above = tl.full((), 0, tl.int32)
        mass_above = tl.full((), 0.0, tl.float64)
        removed = False
        first = tl.min(tl.where(block_peaks >= token_logit, block_index, BLOCKS))
        while (first < blocks) & (removed == 0):
            block = first + tl.arange(0, GROUP)
            reads_block = tl.load(peaks + row * blocks + block, mask=block < blocks, other=-float("inf")) >= token_logit
            entries = block[:, None] * BLOCK + lane[None, :]
            mask = reads_block[:, None] & (entries < vocabulary)
            logit = tl.load(row_logits + entries, mask=mask, other=-float("inf")).to(tl.float32)
            is_above = logit > token_logit
            ties_before = tl.sum(((logit == token_logit) & (entries < token_id)).to(tl.int32))
            count_above += tl.sum(is_above.to(tl.int32))
            mass = tl.sum(tl.where(is_above, tl.exp2((logit - peak) * inv_temperature), 0.0), axis=1)
            mass_above += tl.sum(mass.to(tl.float64)) + ties_before * token_mass
            removed = ((k > 0) & (count_above >= k)) | ((p < 1) & (mass_above > 0) & (mass_above >= p * total))
            is_next = (block_peaks >= token_logit) & (block_index >= first + GROUP)
            first = tl.min(tl.where(is_next, block_index, BLOCKS))

        # Derive the verdict. The top k includes the token and the entries above it, so its mass is at least theirs.
        min_top_k_mass = tl.where(k > 0, mass_above + token_mass, total)
        if removed:
            verdict = tl.where((k > 0) & (count_above < k), UNDECIDED, REMOVED)
        elif (p < 1) & (mass_above > 0) & (mass_above >= p * min_top_k_mass):
            verdict = UNDECIDED
        elif token_logit < min_p_limit(peak, safe_temperature, min_p_row):
            verdict = MIN_P_ONLY
        tl.store(masses_above + filtered_row, mass_above)
    tl.store(verdicts + filtered_row, verdict)
