"""Resample rows whose token is removed by top-k, top-p or min-p, from the tokens that these filters keep.

Entries above the row's threshold are kept. Of the entries equal to it (ties), as many are kept as top-p needs, lower
ids first. The token is selected by inverting the CDF of the kept entries, as `sample_blocks` does for whole rows.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

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
    collect_entries,
    find_threshold,
    kth_largest,
    load_blocks,
    mass_at_or_above,
)

# Distance from the peak, in temperatures, from which on exponentials are 0 in float32: exp(−104) < 2⁻¹⁵⁰.
_MAX_DISTANCE: tl.constexpr = tl.constexpr(104.0)


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

    1. Bound the threshold from below by `low`, and list the relevant blocks: those whose peak reaches `low`.
    2. Find the threshold of top-k and top-p in the relevant blocks. Entries are first copied to `scratch`, if they fit.
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
    scratch                        float32 [r, MAX_COLLECTED + 3 × blocks], for each row:
      MAX_COLLECTED                  the relevant entries, if they fit
      blocks                         numbers of the relevant blocks
      blocks                         mass of each block's entries above the threshold
      blocks                         number of each block's entries equal to the threshold
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
        block_peaks, peak, total = combine_masses(peaks, masses, row, inv_temperature, blocks, BLOCKS)
        min_p_threshold = min_p_limit(peak, safe_temperature, tl.load(min_p + filtered_row))
        row_logits = logits + row * stride
        token_id = tl.load(token + row)
        token_logit = tl.load(row_logits + token_id).to(tl.float32)

        # Bound the threshold from below, and list the relevant blocks.
        low = peak - _MAX_DISTANCE * safe_temperature
        low = tl.maximum(low, tl.where(verdict == REMOVED, token_logit, -float("inf")))
        if (k > 0) & (k <= blocks):
            low = kth_largest(block_peaks, k, low, SHIFT)
        low = tl.where(verdict == MIN_P_ONLY, min_p_threshold, low)
        block_index = tl.arange(0, BLOCKS)
        is_relevant = (block_peaks >= low) & (block_index < blocks)
        block_count = tl.sum(is_relevant.to(tl.int32))
        collected = scratch + filtered_row.to(tl.int64) * (MAX_COLLECTED + 3 * blocks)
        block_list, mass_list = collected + MAX_COLLECTED, collected + MAX_COLLECTED + blocks
        tie_list = collected + MAX_COLLECTED + 2 * blocks
        tl.store(block_list + tl.cumsum(is_relevant.to(tl.int32)) - 1, block_index.to(tl.float32), mask=is_relevant)
        tl.debug_barrier()

        # Find the threshold of top-k and top-p.
        threshold, target = low, tl.full((), 0.0, tl.float64)
        is_kept = False
        if verdict != MIN_P_ONLY:
            mass_above_token = tl.where(verdict == UNDECIDED, tl.load(masses_above + filtered_row), float("inf"))
            if PROCESSED:
                # Log-probabilities need the mass of the kept entries, so the search for it must not end early.
                mass_above_token = tl.full((), float("inf"), tl.float64)
            collected_count = collect_entries(
                *(row_logits, block_list, block_count, vocabulary, low, collected, MAX_COLLECTED, BLOCK, GROUP)
            )
            tl.debug_barrier()
            if collected_count <= MAX_COLLECTED:
                collected_blocks = tl.cdiv(collected_count, BLOCK)
                threshold, target, is_kept = _top_k_top_p(
                    *(collected, block_list, collected_blocks, collected_count, low, k, p, mass_above_token, total),
                    *(peak, inv_temperature, SHIFT, BLOCK, 1, False),
                )
            else:
                threshold, target, is_kept = _top_k_top_p(
                    *(row_logits, block_list, block_count, vocabulary, low, k, p, mass_above_token, total),
                    *(peak, inv_temperature, SHIFT, BLOCK, GROUP, True),
                )

        # Raise the threshold to that of min-p. If top-k and top-p keep the token but min-p removes it, the threshold of
        # min-p lies above the token's logit and alone decides which entries are kept.
        top_p_decides = (p < 1) & (is_kept == 0) & (verdict != MIN_P_ONLY) & (threshold >= min_p_threshold)
        threshold = tl.maximum(threshold, min_p_threshold)
        if (is_kept == 0) | (token_logit < min_p_threshold):
            # Sum the mass of each block's kept entries, and test whether the token is one of them.
            block_mass, ties, ties_before = _kept_masses(
                *(row_logits, block_list, mass_list, tie_list, block_count, is_relevant, threshold, target),
                *(top_p_decides, peak, inv_temperature, vocabulary, BLOCK, BLOCKS, GROUP),
            )
            keep, _ = _kept_entries(
                *(row_logits, token_id // BLOCK, threshold, ties, ties_before, vocabulary, BLOCK, BLOCKS)
            )
            token_is_kept = tl.sum((keep & (tl.arange(0, BLOCK) == token_id % BLOCK)).to(tl.int32))

            # Select a block and an entry.
            if token_is_kept == 0:
                running = tl.cumsum(block_mass)
                cdf_target = second_uniform(seed + row, sample + row, position + row) * tl.max(running)
                block = search_cdf(block_mass, running, cdf_target, blocks - 1, BLOCKS)
                cdf_target -= tl.sum(tl.where(block_index == block, running - block_mass, 0.0))
                keep, logit = _kept_entries(
                    *(row_logits, block, threshold, ties, ties_before, vocabulary, BLOCK, BLOCKS)
                )
                weight = tl.where(keep, tl.exp2((logit - peak) * inv_temperature), 0.0).to(tl.float64)
                new_token = block * BLOCK + search_cdf(weight, tl.cumsum(weight), cdf_target, 0, BLOCK)
                token_id = tl.minimum(new_token, vocabulary - 1).to(tl.int64)
                tl.store(token + row, token_id)
            if PROCESSED:
                log_mass = tl.log(tl.sum(block_mass).to(tl.float32))
                token_logit = tl.load(row_logits + token_id).to(tl.float32)
                tl.store(logprob + row, (token_logit - peak) * (inv_temperature / LOG2E) - log_mass)
                tl.store(log_sum + row, log_mass)


@triton.jit
def _top_k_top_p(
    values: tl.tensor,
    block_list: tl.tensor,
    block_count: tl.tensor,
    vocabulary: tl.tensor,
    low: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    mass_above_token: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Find the threshold of top-k and top-p among the relevant entries of `values`.

    `mass_above_token` is the mass of the entries above the sampled token; infinity if the token is known to be removed.
    Arguments of the same names are those of `find_threshold`; `total` is the mass of all entries.

    Return three values:
      threshold  smallest logit that top-k and top-p keep; if `is_kept`, the smallest that top-k keeps
      target     mass of the kept entries that top-p requires
      is_kept    whether top-k and top-p keep the sampled token; the search then ends before the threshold of top-p
    """
    threshold, target = low, tl.full((), 0.0, tl.float64)
    is_kept = False
    if k > 0:
        threshold = find_threshold(
            *(values, block_list, block_count, vocabulary, threshold, k.to(tl.float64), peak, inv_temperature, True),
            *(SHIFT, BLOCK, GROUP, LISTED),
        )
    if p < 1:
        if k > 0:
            total = mass_at_or_above(
                values, block_list, block_count, vocabulary, threshold, peak, inv_temperature, BLOCK, GROUP, LISTED
            )
        target = p * total
        is_kept = mass_above_token < target
        if is_kept == 0:
            threshold = find_threshold(
                *(values, block_list, block_count, vocabulary, threshold, target, peak, inv_temperature, False),
                *(SHIFT, BLOCK, GROUP, LISTED),
            )
    return threshold, target, is_kept


@triton.jit
def _kept_masses(
    row_logits: tl.tensor,
    block_list: tl.tensor,
    mass_list: tl.tensor,
    tie_list: tl.tensor,
    block_count: tl.tensor,
    is_relevant: tl.tensor,
    threshold: tl.tensor,
    target: tl.tensor,
    top_p_decides: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the mass of each block's kept entries, the number of kept ties, and the ties in the blocks before each.

    Masses are sums of exponentials relative to the peak, float64 `[BLOCKS]`. Ties are entries equal to `threshold`. All
    ties are kept, unless `top_p_decides`: then as many as the mass `target` needs. `mass_list` and `tie_list` are
    scratch memory, float32 `[blocks]`.
    """
    for first in range(0, block_count, GROUP):
        logit, block = load_blocks(row_logits, block_list, first, block_count, vocabulary, BLOCK, GROUP)
        is_listed = first + tl.arange(0, GROUP) < block_count
        mass = tl.sum(tl.where(logit > threshold, tl.exp2((logit - peak) * inv_temperature), 0.0), axis=1)
        tl.store(mass_list + block, mass, mask=is_listed)
        tl.store(tie_list + block, tl.sum((logit == threshold).to(tl.float32), axis=1), mask=is_listed)
    tl.debug_barrier()
    block_index = tl.arange(0, BLOCKS)
    block_mass = tl.load(mass_list + block_index, mask=is_relevant, other=0.0).to(tl.float64)
    block_ties = tl.load(tie_list + block_index, mask=is_relevant, other=0.0)
    tie_mass = tl.exp2((threshold - peak) * inv_temperature).to(tl.float64)
    ties = tl.sum(block_ties)
    if top_p_decides:
        needed = tl.ceil((target - tl.sum(block_mass)) / tl.where(tie_mass > 0, tie_mass, 1.0))
        ties = tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float64)).to(tl.float32)
    ties_before = tl.cumsum(block_ties) - block_ties
    block_mass += tie_mass * tl.minimum(tl.maximum(ties - ties_before, 0.0), block_ties).to(tl.float64)
    return block_mass, ties, ties_before


@triton.jit
def _kept_entries(
    row_logits: tl.tensor,
    block: tl.tensor,
    threshold: tl.tensor,
    ties: tl.tensor,
    ties_before: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return which entries of a block are kept, and the logits of the block: both `[BLOCK]`.

    Of the row's ties, the first `ties` are kept; `ties_before` counts the ties in the blocks before each block.
    """
    entries = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(row_logits + entries, mask=entries < vocabulary, other=-float("inf")).to(tl.float32)
    is_tie = logit == threshold
    tie_rank = tl.cumsum(is_tie.to(tl.int32)) - 1
    tie_rank += tl.sum(tl.where(tl.arange(0, BLOCKS) == block, ties_before, 0.0)).to(tl.int32)
    return (logit > threshold) | (is_tie & (tie_rank < ties)), logit
