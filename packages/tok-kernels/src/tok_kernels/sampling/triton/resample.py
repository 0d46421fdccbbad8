"""Resample rows whose token is removed by top-k, top-p or min-p, from the tokens that these filters keep.

Entries above the row's threshold are kept. Of the entries equal to it (ties), as many are kept as top-p needs, lower
ids first. The token is selected by inverting the CDF of the kept entries, as `sample_blocks` does for whole rows.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tok_kernels.sampling.triton.block_sampling import LOG2E, inverse_temperature, search_cdf, second_uniform
from tok_kernels.sampling.triton.filter_check import (
    KEPT,
    MIN_P_ONLY,
    REMOVED,
    UNALIGNED,
    UNDECIDED,
    combine_masses,
    min_p_limit,
    safe_temperature_of,
)
from tok_kernels.sampling.triton.filter_threshold import (
    RowBlocks,
    SoftmaxScale,
    collect_entries,
    find_threshold,
    kth_largest,
    load_blocks,
    mass_at_or_above,
    weight_of,
)

# Distance from the peak, in temperatures, from which on exponentials are 0 in float32: exp(−104) < 2⁻¹⁵⁰.
_MAX_DISTANCE: tl.constexpr = tl.constexpr(104.0)


class Scratch(NamedTuple):
    """Pointers to the scratch memory of one row, float32.

    entries     [MAX_COLLECTED], the relevant entries, if they fit
    block_list  [blocks], numbers of the relevant blocks
    mass_list   [blocks], mass of each relevant block's entries above the threshold
    tie_list    [blocks], number of each relevant block's entries equal to the threshold
    """

    entries: tl.tensor
    block_list: tl.tensor
    mass_list: tl.tensor
    tie_list: tl.tensor


class KeptEntries(NamedTuple):
    """Entries of a row that the filters keep: those above the threshold, and the first `ties` of those equal to it.

    threshold    float32
    ties         number of entries equal to the threshold that are kept, those of the lowest ids
    ties_before  float32 [BLOCKS], number of entries equal to the threshold in the blocks before each
    block_mass   float64 [BLOCKS], sum of the weights of each block's kept entries
    """

    threshold: tl.tensor
    ties: tl.tensor
    ties_before: tl.tensor
    block_mass: tl.tensor


@triton.jit(do_not_specialize_on_alignment=[*UNALIGNED, "seed", "sample", "position", "logprob", "log_sum"])
def resample_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    sample: tl.tensor,
    position: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    token: tl.tensor,
    verdicts: tl.tensor,
    masses_above: tl.tensor,
    scratch: tl.tensor,
    logprob: tl.tensor,
    log_sum: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    PROCESSED: tl.constexpr,
) -> None:
    """Resample the token of one row with filters, unless its verdict is KEPT. Grid: `(r,)`.

    1. Bound the threshold from below, and list the relevant blocks: those whose peak reaches this bound.
    2. Find the threshold of top-k and top-p in the relevant blocks.
    3. Raise the threshold to that of min-p, and sum the mass of each block's kept entries.
    4. If the token is removed, select a block and then an entry at the row's second uniform number.
    5. With PROCESSED, also for rows of verdict KEPT: store the token's log-probability among the kept tokens, and the
       logarithm of their mass.

    logits                         [R, vocabulary], with `stride` between rows
    rows, top_k, top_p, min_p      [r], the columns of `Filters`
    temperature to position        [R], the columns of `RandomKeys`
    peaks, masses                  float32 [R, blocks], of `BlockSums`
    token                          int64 [R], updated in place
    verdicts, masses_above         int32 and float64 [r], of `check_filters_kernel`
    scratch                        float32 [r, MAX_COLLECTED + 3 × blocks], the memory of each row's `Scratch`
    logprob, log_sum               float32 [R], updated in place with PROCESSED
    BLOCK, BLOCKS                  entries of a block; `blocks` rounded up to a power of two
    GROUP                          blocks read at a time
    SHIFT                          see `tok_kernels.sampling.triton.filter_threshold`
    """
    filtered_row = tl.program_id(0)
    verdict = tl.load(verdicts + filtered_row)
    row = tl.load(rows + filtered_row).to(tl.int64)
    k, p = tl.load(top_k + filtered_row), tl.load(top_p + filtered_row)
    row_temperature = tl.load(temperature + row)
    is_computed = verdict != KEPT
    if PROCESSED:
        has_filter = (k > 0) | (p < 1) | (tl.load(min_p + filtered_row) > 0)
        is_computed = is_computed | (has_filter & (row_temperature > 0) & (tl.load(log_sum + row) > -float("inf")))
    if is_computed:
        safe_temperature, inv_temperature = safe_temperature_of(row_temperature), inverse_temperature(row_temperature)
        block_peaks, peak, total_mass = combine_masses(peaks, masses, row, inv_temperature, blocks, BLOCKS)
        scale = SoftmaxScale(peak=peak, inv_temperature=inv_temperature)
        min_p_threshold = min_p_limit(peak, safe_temperature, tl.load(min_p + filtered_row))
        row_logits = logits + row * stride
        token_id = tl.load(token + row)
        token_logit = tl.load(row_logits + token_id).to(tl.float32)

        # Bound the threshold from below, and list the relevant blocks. Weights far from the peak are 0. If the token is
        # removed, the kept entries rank above it. At least k entries reach the k-th largest of the peaks.
        lower_bound = peak - _MAX_DISTANCE * safe_temperature
        lower_bound = tl.maximum(lower_bound, tl.where(verdict == REMOVED, token_logit, -float("inf")))
        if (k > 0) & (k <= blocks):
            lower_bound = kth_largest(block_peaks, k, lower_bound, SHIFT)
        lower_bound = tl.where(verdict == MIN_P_ONLY, min_p_threshold, lower_bound)
        is_relevant = (block_peaks >= lower_bound) & (tl.arange(0, BLOCKS) < blocks)
        memory = _scratch_of(scratch, filtered_row, blocks, MAX_COLLECTED)
        relevant = RowBlocks(
            entries=row_logits,
            size=vocabulary,
            block_list=memory.block_list,
            block_count=_list_blocks(is_relevant, memory.block_list, BLOCKS),
        )

        # Find the threshold of top-k and top-p.
        threshold, target = lower_bound, tl.full((), 0.0, tl.float64)
        passes = False  # whether top-k and top-p keep the token; the threshold of top-p is then unknown
        if verdict != MIN_P_ONLY:
            mass_above_token = tl.where(verdict == UNDECIDED, tl.load(masses_above + filtered_row), float("inf"))
            if PROCESSED:
                # Log-probabilities need the mass of the kept entries, so the search for it must not end early.
                mass_above_token = tl.full((), float("inf"), tl.float64)
            threshold, target, passes = _find_top_k_top_p(
                *(relevant, memory.entries, lower_bound, k, p, mass_above_token, total_mass, scale),
                *(SHIFT, MAX_COLLECTED, BLOCK, GROUP),
            )

        # Raise the threshold to that of min-p. If top-k and top-p keep the token but min-p removes it, the threshold of
        # min-p lies above the token's logit and alone decides which entries are kept.
        top_p_decides = (p < 1) & (passes == 0) & (verdict != MIN_P_ONLY) & (threshold >= min_p_threshold)
        threshold = tl.maximum(threshold, min_p_threshold)
        if (passes == 0) | (token_logit < min_p_threshold):
            kept = _sum_kept_entries(
                relevant, is_relevant, memory, threshold, target, top_p_decides, scale, BLOCK, BLOCKS, GROUP
            )
            keep, _ = _kept_in_block(row_logits, vocabulary, token_id // BLOCK, kept, BLOCK, BLOCKS)
            token_is_kept = tl.sum((keep & (tl.arange(0, BLOCK) == token_id % BLOCK)).to(tl.int32))
            if token_is_kept == 0:
                u = second_uniform(seed + row, sample + row, position + row)
                token_id = _sample_kept(row_logits, vocabulary, kept, u, scale, blocks, BLOCK, BLOCKS)
                tl.store(token + row, token_id)
            if PROCESSED:
                log_mass = tl.log(tl.sum(kept.block_mass).to(tl.float32))
                token_logit = tl.load(row_logits + token_id).to(tl.float32)
                tl.store(logprob + row, (token_logit - peak) * (inv_temperature / LOG2E) - log_mass)
                tl.store(log_sum + row, log_mass)


@triton.jit
def _scratch_of(scratch: tl.tensor, filtered_row: tl.tensor, blocks: tl.tensor, MAX_COLLECTED: tl.constexpr) -> Scratch:
    """Return the scratch memory of a row with filters; `scratch` is that of all of them."""
    entries = scratch + filtered_row.to(tl.int64) * (MAX_COLLECTED + 3 * blocks)
    return Scratch(
        entries=entries,
        block_list=entries + MAX_COLLECTED,
        mass_list=entries + MAX_COLLECTED + blocks,
        tie_list=entries + MAX_COLLECTED + 2 * blocks,
    )


@triton.jit
def _list_blocks(is_relevant: tl.tensor, block_list: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Write the numbers of the relevant blocks to `block_list`, and return how many there are."""
    count = tl.sum(is_relevant.to(tl.int32))
    block_index = tl.arange(0, BLOCKS)
    tl.store(block_list + tl.cumsum(is_relevant.to(tl.int32)) - 1, block_index.to(tl.float32), mask=is_relevant)
    tl.debug_barrier()
    return count


@triton.jit
def _find_top_k_top_p(
    relevant: RowBlocks,
    copy: tl.tensor,
    lower_bound: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    mass_above_token: tl.tensor,
    total_mass: tl.tensor,
    scale: SoftmaxScale,
    SHIFT: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Find the threshold of top-k and top-p among the relevant entries: copied to `copy` first, if they fit.

    See `_search_top_k_top_p` for the other arguments, and for the result.
    """
    count = collect_entries(relevant, lower_bound, copy, MAX_COLLECTED, BLOCK, GROUP)
    tl.debug_barrier()
    if count <= MAX_COLLECTED:
        collected = RowBlocks(
            entries=copy,
            size=count,
            block_list=relevant.block_list,
            block_count=tl.cdiv(count, BLOCK),
        )
        threshold, target, passes = _search_top_k_top_p(
            collected, lower_bound, k, p, mass_above_token, total_mass, scale, SHIFT, BLOCK, 1, False
        )
    else:
        threshold, target, passes = _search_top_k_top_p(
            relevant, lower_bound, k, p, mass_above_token, total_mass, scale, SHIFT, BLOCK, GROUP, True
        )
    return threshold, target, passes


@triton.jit
def _search_top_k_top_p(
    blocks: RowBlocks,
    lower_bound: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    mass_above_token: tl.tensor,
    total_mass: tl.tensor,
    scale: SoftmaxScale,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Find the threshold of top-k and top-p among the entries of `blocks`.

    lower_bound       no entry below it is kept
    mass_above_token  mass of the entries above the sampled token; infinity if the token is known to be removed
    total_mass        mass of all entries of the row

    Return three values:
      threshold  smallest logit that top-k and top-p keep; if `passes`, the smallest that top-k keeps
      target     mass of the kept entries that top-p requires
      passes     whether top-k and top-p keep the sampled token; the search then ends before the threshold of top-p
    """
    threshold, target = lower_bound, tl.full((), 0.0, tl.float64)
    passes = False
    if k > 0:
        threshold = find_threshold(blocks, threshold, k.to(tl.float64), scale, True, SHIFT, BLOCK, GROUP, LISTED)
    if p < 1:
        if k > 0:
            total_mass = mass_at_or_above(blocks, threshold, scale, BLOCK, GROUP, LISTED)
        target = p * total_mass
        passes = mass_above_token < target
        if passes == 0:
            threshold = find_threshold(blocks, threshold, target, scale, False, SHIFT, BLOCK, GROUP, LISTED)
    return threshold, target, passes


@triton.jit
def _sum_kept_entries(
    relevant: RowBlocks,
    is_relevant: tl.tensor,
    memory: Scratch,
    threshold: tl.tensor,
    target: tl.tensor,
    top_p_decides: tl.tensor,
    scale: SoftmaxScale,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
) -> KeptEntries:
    """Sum the mass of each block's kept entries, and choose how many entries equal to `threshold` (ties) are kept.

    All ties are kept, unless `top_p_decides`: then as many as the mass `target` needs, and at least one. `is_relevant`,
    `[BLOCKS]`, is true for the blocks of `relevant`.
    """
    for first in range(0, relevant.block_count, GROUP):
        logit, block = load_blocks(relevant, first, BLOCK, GROUP, True)
        is_listed = first + tl.arange(0, GROUP) < relevant.block_count
        mass = tl.sum(tl.where(logit > threshold, weight_of(logit, scale), 0.0), axis=1)
        tl.store(memory.mass_list + block, mass, mask=is_listed)
        tl.store(memory.tie_list + block, tl.sum((logit == threshold).to(tl.float32), axis=1), mask=is_listed)
    tl.debug_barrier()
    block_index = tl.arange(0, BLOCKS)
    mass_above = tl.load(memory.mass_list + block_index, mask=is_relevant, other=0.0).to(tl.float64)
    block_ties = tl.load(memory.tie_list + block_index, mask=is_relevant, other=0.0)
    tie_mass = weight_of(threshold, scale).to(tl.float64)
    ties = tl.sum(block_ties)
    if top_p_decides:
        needed = tl.ceil((target - tl.sum(mass_above)) / tl.where(tie_mass > 0, tie_mass, 1.0))
        ties = tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float64)).to(tl.float32)
    ties_before = tl.cumsum(block_ties) - block_ties
    kept_ties = tl.minimum(tl.maximum(ties - ties_before, 0.0), block_ties).to(tl.float64)
    return KeptEntries(
        threshold=threshold, ties=ties, ties_before=ties_before, block_mass=mass_above + tie_mass * kept_ties
    )


@triton.jit
def _kept_in_block(
    row_logits: tl.tensor,
    vocabulary: tl.tensor,
    block: tl.tensor,
    kept: KeptEntries,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return which entries of a block are kept, and the logits of the block: both `[BLOCK]`."""
    entries = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(row_logits + entries, mask=entries < vocabulary, other=-float("inf")).to(tl.float32)
    is_tie = logit == kept.threshold
    tie_rank = tl.cumsum(is_tie.to(tl.int32)) - 1
    tie_rank += tl.sum(tl.where(tl.arange(0, BLOCKS) == block, kept.ties_before, 0.0)).to(tl.int32)
    return (logit > kept.threshold) | (is_tie & (tie_rank < kept.ties)), logit


@triton.jit
def _sample_kept(
    row_logits: tl.tensor,
    vocabulary: tl.tensor,
    kept: KeptEntries,
    u: tl.tensor,
    scale: SoftmaxScale,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Return the token, int64, at which the CDF of the kept entries exceeds the uniform number `u`."""
    # Select a block, then an entry of it at what the blocks before leave of the target.
    running = tl.cumsum(kept.block_mass)
    target = u * tl.max(running)
    block = search_cdf(kept.block_mass, running, target, blocks - 1, BLOCKS)
    target -= tl.sum(tl.where(tl.arange(0, BLOCKS) == block, running - kept.block_mass, 0.0))
    keep, logit = _kept_in_block(row_logits, vocabulary, block, kept, BLOCK, BLOCKS)
    weight = tl.where(keep, weight_of(logit, scale), 0.0).to(tl.float64)
    token_id = block * BLOCK + search_cdf(weight, tl.cumsum(weight), target, 0, BLOCK)
    return tl.minimum(token_id, vocabulary - 1).to(tl.int64)
