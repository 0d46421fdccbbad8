"""Sample tokens with one read of the logits in their own dtype; only rows with masks, edits or filters cost more."""

from __future__ import annotations

from torch import Tensor

from tok_kernels.batch import Sampled, SamplingBatch
from tok_kernels.sampling.top_logprobs import check_top_logprobs, no_top_logprobs, top_logprobs
from tok_kernels.sampling.triton.block_sampling import RandomKeys, sample_blocks
from tok_kernels.sampling.triton.edits import resample_edited
from tok_kernels.sampling.triton.filters import resample_filtered
from tok_kernels.sampling.triton.masks import forbid
from tok_kernels.sampling.triton.shards import sample_shards


def sample(logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
    """Compute `Backend.sample`; float16 logits are allowed as well.

    The token equals the reference's token, except where rounding decides.
    """
    rows, vocabulary = logits_RV.shape
    check_top_logprobs(batch, vocabulary)
    logits = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    if batch.shards is not None:
        sampled_shards = sample_shards(logits, RandomKeys.of(batch), batch.shards, greedy=batch.all_greedy)
        return Sampled(*sampled_shards, *no_top_logprobs(rows, logits.device))
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
    return Sampled(token, logprob, *top_logprobs(logits, sampled.log_sum, batch))
