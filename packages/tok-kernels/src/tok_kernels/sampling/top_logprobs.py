"""Compute the log-sum-exp of logits, and the top-k tokens and log-probabilities of rows that request them."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import SamplingBatch

_MAX_CHUNK_ROWS = 64  # rows summed or searched at once; limits the memory
_FIXED_POINT_ONE = 2.0**44  # fixed-point value of an exponential of 1: sums of 2¹⁸ entries fit into int64


def log_sum_exp(logits_RV: Tensor) -> Tensor:
    """Return the natural log-sum-exp of each row of float32 logits, float32 `[R]`; −inf if all logits are −inf.

    Exponentials are summed as fixed-point integers, because the order of a float sum, and so its rounding, depends on
    device, shape and number of threads.
    """
    peak_R = logits_RV.amax(-1)
    total_R = torch.empty_like(peak_R)
    for start in range(0, len(logits_RV), _MAX_CHUNK_ROWS):
        rows = slice(start, start + _MAX_CHUNK_ROWS)
        weight = torch.exp(logits_RV[rows] - peak_R[rows].unsqueeze(-1)).mul_(_FIXED_POINT_ONE)
        total_R[rows] = weight.long().sum(-1).double().div_(_FIXED_POINT_ONE).float()
    return torch.where(peak_R.isfinite(), peak_R + torch.log(total_R), peak_R)


def check_top_logprobs(batch: SamplingBatch, vocabulary: int) -> None:
    """Raise ValueError if `batch.top_logprobs` is negative or exceeds the vocabulary."""
    if not 0 <= batch.top_logprobs <= vocabulary:
        raise ValueError(f"top_logprobs is {batch.top_logprobs!r}; allowed: 0 to the vocabulary's {vocabulary}")


def top_logprobs(logits_RV: Tensor, log_sum_R: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return `Sampled.top_token` and `Sampled.top_logprob`; `log_sum_R` is the log-sum-exp of each row, float32."""
    rows, count = batch.top_rows, batch.top_logprobs
    if not count:
        return no_top_logprobs(len(logits_RV), logits_RV.device)
    size = len(logits_RV), count
    if rows is not None:
        logits_RV, log_sum_R = logits_RV.index_select(0, rows), log_sum_R.index_select(0, rows)
    value, token = top_values(logits_RV, count)
    logprob = value.float() - log_sum_R.unsqueeze(-1)
    if rows is None:
        return token, logprob
    return token.new_zeros(size).index_copy_(0, rows, token), logprob.new_zeros(size).index_copy_(0, rows, logprob)


def top_values(scores_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of each row in descending order, and their indices (int64).

    Equal values are ordered by index. If not all of those equal to the last value fit, the lowest indices are returned.
    """
    parts = [_top_values_of_chunk(part_RV, count) for part_RV in torch.split(scores_RV, _MAX_CHUNK_ROWS)]
    value, token = (torch.cat(column) for column in zip(*parts, strict=True))
    return value, token


def _top_values_of_chunk(scores_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `top_values` of rows that fit into memory together."""
    value, token = scores_RV.topk(count, dim=-1)
    if not count:
        return value, token
    token, order = token.sort(dim=-1)
    value, order = value.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    token = token.gather(-1, order)
    # `topk` returns any of the entries that tie with the last value. Replace them by those with the lowest indices.
    vocabulary = scores_RV.shape[1]
    from_end = torch.arange(vocabulary, 0, -1, dtype=torch.int32, device=token.device)
    tied_token = torch.where(scores_RV == value[:, -1:], from_end, 0).topk(count, dim=-1).values
    tie_rank = torch.arange(count, device=token.device) - (value > value[:, -1:]).sum(-1, keepdim=True)
    tied_token = tied_token.gather(-1, tie_rank.clamp(min=0))
    return value, torch.where((tie_rank >= 0) & (tied_token > 0), vocabulary - tied_token.long(), token)


def no_top_logprobs(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `Sampled.top_token` and `Sampled.top_logprob` of width 0."""
    empty = torch.empty((rows, 0), dtype=torch.float32, device=device)
    return empty.long(), empty
