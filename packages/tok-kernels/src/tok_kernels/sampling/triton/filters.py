"""Apply top-k, top-p and min-p without a sort: keep most tokens sampled from whole rows, and resample the others."""
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

# Blocks read at a time, and warps, of the check and of resampling, measured on an H200.
CHECK_BLOCKS, CHECK_WARPS = 4, 4
RESAMPLE_BLOCKS, RESAMPLE_WARPS = 1, 4
# If a row has at most this many relevant entries, they are copied to scratch memory and searched there.
MAX_COLLECTED_ENTRIES = 2048


def resample_filtered(
    logits_RV: Tensor, sampled: SampledRows, keys: RandomKeys, filters: Filters, *, processed: bool = False
) -> Tensor:
    """Return the tokens of `sample_blocks(logits_RV, keys)`, int64 `[R]`; tokens that filters remove are resampled.

    `tok_kernels.sampling.reference.filters` defines which tokens are kept and which token replaces a removed one.
    If `processed`, log-probabilities and sums of rows with filters change in place to those of the kept tokens.
    """
    token, count = sampled.token.clone(), len(filters.rows)
    if not count:
        return token
    verdict, before = filter_verdicts(logits_RV, sampled, keys, filters)
    blocks = triton.cdiv(logits_RV.shape[1], BLOCK)
    scratch = torch.empty((count, MAX_COLLECTED_ENTRIES + 3 * blocks), dtype=torch.float32, device=token.device)
    resample_kernel[(count,)](
        *(logits_RV, logits_RV.stride(0), *_columns(filters)),
        *(keys.temperature, keys.seed, keys.sample, keys.position, sampled.sums[0], sampled.sums[2]),
        *(token, verdict, before, scratch, sampled.logprob, sampled.log_sum, logits_RV.shape[1], blocks),
        SHIFT=shift_of(logits_RV.dtype),
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        GROUP=RESAMPLE_BLOCKS,
        FEW=MAX_COLLECTED_ENTRIES,
        PROCESSED=processed,
        num_warps=RESAMPLE_WARPS,
    )
    return token


def filter_verdicts(
    logits_RV: Tensor, sampled: SampledRows, keys: RandomKeys, filters: Filters
) -> tuple[Tensor, Tensor]:
    """Return verdicts and masses of `check_filters_kernel` for the r > 0 rows with filters, int32 and float64 `[r]`."""
    count, blocks = len(filters.rows), triton.cdiv(logits_RV.shape[1], BLOCK)
    verdict = torch.empty(count, dtype=torch.int32, device=logits_RV.device)
    before = torch.empty(count, dtype=torch.float64, device=logits_RV.device)
    check_filters_kernel[(count,)](
        *(logits_RV, logits_RV.stride(0), *_columns(filters), keys.temperature, sampled.sums[0], sampled.sums[2]),
        *(sampled.token, verdict, before, logits_RV.shape[1], blocks),
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        GROUP=CHECK_BLOCKS,
        num_warps=CHECK_WARPS,
    )
    return verdict, before


def _columns(filters: Filters) -> list[Tensor]:
    return [x.contiguous() for x in (filters.rows, filters.top_k, filters.top_p, filters.min_p)]
