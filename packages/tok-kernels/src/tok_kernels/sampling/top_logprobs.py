"""Find the most likely tokens of rows that ask for them, and their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import SamplingBatch

_SUMMED_ROWS = 64  # rows summed at once, which limits the memory
_UNIT = 2.0**44  # what an exponential of 1 counts as; 2¹⁸ of them stay below 2⁶³


def log_sum_exp(logits_RV: Tensor) -> Tensor:
    """Return the natural log-sum-exp of each row of float32 logits, float32 `[R]`; −inf if all logits are −inf.

    Exponentials are rounded to integers, whose sum does not depend on its order, which differs between devices, shapes
    and numbers of threads.
    """
    peak_R = logits_RV.amax(-1)
    total_R = torch.empty_like(peak_R)
    for start in range(0, len(logits_RV), _SUMMED_ROWS):
        rows = slice(start, start + _SUMMED_ROWS)
        weight = torch.exp(logits_RV[rows] - peak_R[rows].unsqueeze(-1)).mul_(_UNIT)
        total_R[rows] = weight.long().sum(-1).double().div_(_UNIT).float()
    return torch.where(peak_R.isfinite(), peak_R + torch.log(total_R), peak_R)


def check_top_logprobs(batch: SamplingBatch, vocabulary: int) -> None:
    """Raise ValueError if `batch.top_logprobs` is negative or exceeds the vocabulary."""
    if not 0 <= batch.top_logprobs <= vocabulary:
        raise ValueError(f"top_logprobs is {batch.top_logprobs!r}; allowed: 0 to the vocabulary's {vocabulary}")


def top_logprobs(logits_RV: Tensor, log_sum_R: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return `Sampled.top_token` and `Sampled.top_logprob`; `log_sum_R` is the natural log-sum-exp of each row."""
    rows, count = batch.top_rows, batch.top_logprobs
    if not count:
        return no_top_logprobs(len(logits_RV), logits_RV.device)
    size = len(logits_RV), count
    if rows is not None:
        logits_RV, log_sum_R = logits_RV.index_select(0, rows), log_sum_R.index_select(0, rows)
    value, token = logits_RV.topk(count, dim=-1)
    # `topk` returns equal values in any order: sort them by id.
    token, order = token.sort(dim=-1)
    value, order = value.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    token, logprob = token.gather(-1, order), value.float() - log_sum_R.unsqueeze(-1)
    if rows is None:
        return token, logprob
    return token.new_zeros(size).index_copy_(0, rows, token), logprob.new_zeros(size).index_copy_(0, rows, logprob)


def no_top_logprobs(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `Sampled.top_token` and `Sampled.top_logprob` of width 0."""
    empty = torch.empty((rows, 0), dtype=torch.float32, device=device)
    return empty.long(), empty
