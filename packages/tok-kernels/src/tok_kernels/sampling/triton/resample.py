"""Resample the rows whose token the filters removed, from the tokens that the filters keep.

One program per row finds the threshold of the kept entries and the mass of each block's kept entries. Then it finds the
token at the row's second uniform number, as `sample_blocks` does. Entries below the threshold have no weight. Of the
entries at the threshold, only as many count as top-p needs, lower ids first.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tok_kernels.sampling.triton.block_sampling import LOG2E, first_passed, inv_temperature_of, second_uniform
from tok_kernels.sampling.triton.filter_check import (
    ABOVE,
    KEPT,
    LIKELY,
    OPEN,
    UNALIGNED,
    min_p_limit,
    row_sums,
    safe_temperature_of,
)
from tok_kernels.sampling.triton.filter_threshold import find_threshold, gather, kth_largest, mass_from, tile_of

# Distance from the peak, in temperatures, at which exponentials are 0 in float32.
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
    FEW: tl.constexpr,
    PROCESSED: tl.constexpr,
) -> None:
    """Resample one row with filters, unless its verdict is KEPT.

    With PROCESSED, also store the log-probability of the token among the kept ones, and the logarithm of their mass.

    `scratch`, float32 `[r, FEW + 3 · blocks]`, holds per row:
      FEW     the relevant entries, if there are at most FEW
      blocks  numbers of the relevant blocks
      blocks  mass of each block's entries above the threshold
      blocks  number of each block's entries at the threshold
    """
    nth_row = tl.program_id(0)
    verdict = tl.load(verdicts + nth_row)
    row = tl.load(rows + nth_row).to(tl.int64)
    k, p = tl.load(top_k + nth_row), tl.load(top_p + nth_row)
    row_temperature = tl.load(temperature + row)
    computed = verdict != KEPT
    if PROCESSED:
        filtered = (k > 0) | (p < 1) | (tl.load(min_p + nth_row) > 0)
        computed = computed | (filtered & (row_temperature > 0) & (tl.load(log_sum + row) > -float("inf")))
    if computed:
        safe_temperature, inv_temperature = safe_temperature_of(row_temperature), inv_temperature_of(row_temperature)
        peak_of, peak, total = row_sums(peaks, masses, row, inv_temperature, blocks, BLOCKS)
        min_p_threshold = min_p_limit(peak, safe_temperature, tl.load(min_p + nth_row))
        line = logits + row * stride
        chosen = tl.load(token + row)
        own = tl.load(line + chosen).to(tl.float32)

        low = tl.maximum(peak - _MAX_DISTANCE * safe_temperature, tl.where(verdict == ABOVE, own, -float("inf")))
        if (k > 0) & (k <= blocks):
            low = kth_largest(peak_of, k, low, SHIFT)
        low = tl.where(verdict == LIKELY, min_p_threshold, low)
        nth = tl.arange(0, BLOCKS)
        matters = (peak_of >= low) & (nth < blocks)
        active = tl.sum(matters.to(tl.int32))
        few = scratch + nth_row.to(tl.int64) * (FEW + 3 * blocks)
        order, above, equal = few + FEW, few + FEW + blocks, few + FEW + 2 * blocks
        tl.store(order + tl.cumsum(matters.to(tl.int32)) - 1, nth.to(tl.float32), mask=matters)
        tl.debug_barrier()

        threshold, target = low, tl.full((), 0.0, tl.float64)
        settled = False
        if verdict != LIKELY:
            before = tl.where(verdict == OPEN, tl.load(masses_above + nth_row), float("inf"))
            if PROCESSED:
                before = tl.full((), float("inf"), tl.float64)  # the mass of the kept tokens is needed in any case
            count = gather(line, order, active, vocabulary, low, few, FEW, BLOCK, GROUP)
            tl.debug_barrier()
            if count <= FEW:
                parts = tl.cdiv(count, BLOCK)
                threshold, target, settled = _top_k_top_p(
                    *(few, order, parts, count, low, k, p, before, total, peak, inv_temperature),
                    *(SHIFT, BLOCK, 1, False),
                )
            else:
                threshold, target, settled = _top_k_top_p(
                    *(line, order, active, vocabulary, low, k, p, before, total, peak, inv_temperature),
                    *(SHIFT, BLOCK, GROUP, True),
                )
        # If top-k and top-p keep the token but min-p removes it, the threshold of min-p lies above the token's logit
        # and alone decides which entries are kept.
        nucleus = (p < 1) & (settled == 0) & (verdict != LIKELY) & (threshold >= min_p_threshold)
        threshold = tl.maximum(threshold, min_p_threshold)
        if (settled == 0) | (own < min_p_threshold):
            for first in range(0, active, GROUP):
                x, block = tile_of(line, order, first, active, vocabulary, BLOCK, GROUP)
                listed = first + tl.arange(0, GROUP) < active
                mass = tl.sum(tl.where(x > threshold, tl.exp2((x - peak) * inv_temperature), 0.0), axis=1)
                tl.store(above + block, mass, mask=listed)
                tl.store(equal + block, tl.sum((x == threshold).to(tl.float32), axis=1), mask=listed)
            tl.debug_barrier()
            mass_of = tl.load(above + nth, mask=matters, other=0.0).to(tl.float64)
            ties_of = tl.load(equal + nth, mask=matters, other=0.0)
            tie_mass = tl.exp2((threshold - peak) * inv_temperature).to(tl.float64)
            ties = tl.sum(ties_of)
            if nucleus:
                needed = tl.ceil((target - tl.sum(mass_of)) / tl.where(tie_mass > 0, tie_mass, 1.0))
                ties = tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float64)).to(tl.float32)
            ties_before = tl.cumsum(ties_of) - ties_of
            mass_of += tie_mass * tl.minimum(tl.maximum(ties - ties_before, 0.0), ties_of).to(tl.float64)

            keep, _ = _kept_entries(line, chosen // BLOCK, threshold, ties, ties_before, nth, vocabulary, BLOCK)
            stays = tl.sum((keep & (tl.arange(0, BLOCK) == chosen % BLOCK)).to(tl.int32))
            if stays == 0:
                running = tl.cumsum(mass_of)
                goal = second_uniform(seed + row, sample + row, position + row) * tl.max(running)
                block = first_passed(mass_of, running, goal, blocks - 1, BLOCKS)
                goal -= tl.sum(tl.where(nth == block, running - mass_of, 0.0))
                keep, x = _kept_entries(line, block, threshold, ties, ties_before, nth, vocabulary, BLOCK)
                weight = tl.where(keep, tl.exp2((x - peak) * inv_temperature), 0.0).to(tl.float64)
                found = block * BLOCK + first_passed(weight, tl.cumsum(weight), goal, 0, BLOCK)
                chosen = tl.minimum(found, vocabulary - 1).to(tl.int64)
                tl.store(token + row, chosen)
            if PROCESSED:
                log_mass = tl.log(tl.sum(mass_of).to(tl.float32))
                own = tl.load(line + chosen).to(tl.float32)
                tl.store(logprob + row, (own - peak) * (inv_temperature / LOG2E) - log_mass)
                tl.store(log_sum + row, log_mass)


@triton.jit
def _top_k_top_p(
    line: tl.tensor,
    order: tl.tensor,
    active: tl.tensor,
    vocabulary: tl.tensor,
    low: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    before: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the smallest logit that top-k and top-p keep, the mass that top-p needs, and whether they keep the token.

    `before` is the mass of the entries above the token. If it shows that the token is kept, the search ends early, and
    the first result is the smallest logit that top-k keeps.
    """
    threshold, target = low, tl.full((), 0.0, tl.float64)
    settled = False
    if k > 0:
        threshold = find_threshold(
            *(line, order, active, vocabulary, threshold, k.to(tl.float64), peak, inv_temperature, True),
            *(SHIFT, BLOCK, GROUP, LISTED),
        )
    if p < 1:
        if k > 0:
            total = mass_from(line, order, active, vocabulary, threshold, peak, inv_temperature, BLOCK, GROUP, LISTED)
        target = p * total
        settled = before < target
        if settled == 0:
            threshold = find_threshold(
                *(line, order, active, vocabulary, threshold, target, peak, inv_temperature, False),
                *(SHIFT, BLOCK, GROUP, LISTED),
            )
    return threshold, target, settled


@triton.jit
def _kept_entries(
    line: tl.tensor,
    block: tl.tensor,
    threshold: tl.tensor,
    ties: tl.tensor,
    ties_before: tl.tensor,
    nth: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return which entries of the block are kept, and the logits of the block.

    Of the row's entries at the threshold, the first `ties` are kept.
    """
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(line + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    tie = x == threshold
    rank = tl.cumsum(tie.to(tl.int32)) - 1 + tl.sum(tl.where(nth == block, ties_before, 0.0)).to(tl.int32)
    return (x > threshold) | (tie & (rank < ties)), x
