"""Sample tokens with one read of the logits in their own dtype; only rows that use extra features pay for them."""

from __future__ import annotations

from torch import Tensor

from tok_kernels.batch import Sampled, SamplingBatch, empty_top, spread_top
from tok_kernels.sampling.triton.block_sampling import RandomKeys, sample_blocks
from tok_kernels.sampling.triton.edits import resample_edited
from tok_kernels.sampling.triton.filters import resample_filtered
from tok_kernels.sampling.triton.masks import forbid
from tok_kernels.sampling.triton.shards import sample_shards


def sample(logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
    """Sample one token per row; only masks change `logits_RV` (float32, bfloat16 or float16, −inf allowed).

    The order is: masks, penalties, bias, temperature, filters. The same seed gives the reference's token, except where
    rounding decides. Raises ValueError if `top_logprobs` exceeds the vocabulary.
    """
    rows, vocabulary = logits_RV.shape
    if not 0 <= batch.top_logprobs <= vocabulary:
        raise ValueError(f"top_logprobs is {batch.top_logprobs!r}; allowed: 0 to the vocabulary's {vocabulary}")
    logits = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    if batch.shards is not None:
        sampled_shards = sample_shards(logits, RandomKeys.of(batch), batch.shards, greedy=batch.all_greedy)
        return Sampled(*sampled_shards, *empty_top(rows, logits.device))
    if batch.masks is not None:
        forbid(logits, batch.masks)
    keys = RandomKeys.of(batch)
    sampled = sample_blocks(logits, keys, greedy=batch.all_greedy)
    token, logprob = sampled.token, sampled.logprob
    if batch.filters is not None and not batch.all_greedy:
        token = resample_filtered(logits, sampled, keys, batch.filters)
    if rows and not (batch.penalties is None and batch.bias is None):
        token = resample_edited(token, logits, keys, batch)
    if token is not sampled.token:
        logprob = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1).float() - sampled.log_sum
    if not batch.top_logprobs:
        return Sampled(token, logprob, *empty_top(rows, logits.device))
    return Sampled(token, logprob, *_top(logits, sampled.log_sum, batch))


def _top(logits_RV: Tensor, log_sum_R: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return the largest log-probabilities of the rows that ask for them."""
    rows, count = batch.top_rows, len(logits_RV)
    if rows is not None:
        logits_RV, log_sum_R = logits_RV.index_select(0, rows), log_sum_R.index_select(0, rows)
    value, entry = _ranked(*logits_RV.topk(batch.top_logprobs, dim=-1))
    value = value.float() - log_sum_R.unsqueeze(-1)
    return (entry, value) if rows is None else spread_top(rows, entry, value, count)


def _ranked(value: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by value, largest first, with the lower id first among equals, which `topk` does not guarantee."""
    entry, order = entry.sort(dim=-1)
    value, order = value.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return value, entry.gather(-1, order)
