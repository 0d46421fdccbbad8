"""Apply top-k, top-p and min-p without a sort: check the sampled tokens, and resample those that are removed."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tok_kernels.batch import Filters
from tok_kernels.sampling.triton.block_sampling import BLOCK, RandomKeys, SampledRows
from tok_kernels.sampling.triton.filter_check import check_filters_kernel
from tok_kernels.sampling.triton.filter_threshold import shift_of
from tok_kernels.sampling.triton.resample import resample_kernel

# Blocks read at a time, and warps, of the two kernels; measured on an H200.
CHECK_BLOCKS, CHECK_WARPS = 4, 4
RESAMPLE_BLOCKS, RESAMPLE_WARPS = 1, 4
# Up to this many relevant entries of a row are copied to scratch memory and searched there.
MAX_COLLECTED_ENTRIES = 2048


def resample_filtered(
    logits_RV: Tensor, sampled: SampledRows, keys: RandomKeys, filters: Filters, *, processed: bool
) -> Tensor:
    """Return the tokens of `sampled`, int64 `[R]`, with those that filters remove resampled.

    `sampled` is the result of `sample_blocks(logits_RV, keys)`. `tok_kernels.sampling.reference.filters` defines which
    tokens are kept, and which token replaces a removed one. If `processed`, log-probabilities and sums of rows with
    filters change in place to those of the kept tokens.
    """
    token, filtered_rows = sampled.token.clone(), len(filters.rows)
    if not filtered_rows:
        return token
    verdict, mass_above = filter_verdicts(logits_RV, sampled, keys, filters)
    blocks = triton.cdiv(logits_RV.shape[1], BLOCK)
    scratch = torch.empty((filtered_rows, MAX_COLLECTED_ENTRIES + 3 * blocks), dtype=torch.float32, device=token.device)
    resample_kernel[(filtered_rows,)](
        *(logits_RV, logits_RV.stride(0), *_columns(filters)),
        *(keys.temperature, keys.seed, keys.sample, keys.position, sampled.blocks.peaks, sampled.blocks.masses),
        *(token, verdict, mass_above, scratch, sampled.logprob, sampled.log_sum, logits_RV.shape[1], blocks),
        SHIFT=shift_of(logits_RV.dtype),
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        GROUP=RESAMPLE_BLOCKS,
        MAX_COLLECTED=MAX_COLLECTED_ENTRIES,
        PROCESSED=processed,
        num_warps=RESAMPLE_WARPS,
    )
    return token


def filter_verdicts(
    logits_RV: Tensor, sampled: SampledRows, keys: RandomKeys, filters: Filters
) -> tuple[Tensor, Tensor]:
    """Return `verdicts` and `masses_above` of `check_filters_kernel`: int32 and float64 `[r]`, for r > 0 rows."""
    filtered_rows, blocks = len(filters.rows), triton.cdiv(logits_RV.shape[1], BLOCK)
    verdict = torch.empty(filtered_rows, dtype=torch.int32, device=logits_RV.device)
    mass_above = torch.empty(filtered_rows, dtype=torch.float64, device=logits_RV.device)
    check_filters_kernel[(filtered_rows,)](
        *(logits_RV, logits_RV.stride(0), *_columns(filters), keys.temperature),
        *(sampled.blocks.peaks, sampled.blocks.masses, sampled.token, verdict, mass_above, logits_RV.shape[1], blocks),
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        GROUP=CHECK_BLOCKS,
        num_warps=CHECK_WARPS,
    )
    return verdict, mass_above


def _columns(filters: Filters) -> list[Tensor]:
    return [x.contiguous() for x in (filters.rows, filters.top_k, filters.top_p, filters.min_p)]
