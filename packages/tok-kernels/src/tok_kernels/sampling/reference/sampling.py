"""Sample each row's token by inverting the CDF at one uniform number (inverse transform sampling).

Compared to Gumbel noise for every vocabulary entry, the logits are read once, no random number is generated per entry,
and shards of the vocabulary combine by their sums. The result depends only on the row and its key (seed, sample,
position). If filters remove the token, a second number selects another token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Sampled, SamplingBatch
from tok_kernels.sampling.reference.edits import apply_bias, apply_masks, apply_penalties
from tok_kernels.sampling.reference.filters import processed_scores, resample_filtered
from tok_kernels.sampling.reference.inversion import invert_cdf, safe_temperature
from tok_kernels.sampling.reference.philox import uniforms
from tok_kernels.sampling.reference.shards import sample_shards
from tok_kernels.sampling.top_logprobs import check_top_logprobs, log_sum_exp, top_logprobs


def sample(logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
    """Compute `Backend.sample`."""
    check_top_logprobs(batch, logits_RV.shape[1])
    if batch.shards is not None:
        return sample_shards(logits_RV, batch, batch.shards)
    if batch.masks is not None:
        apply_masks(logits_RV, batch.masks)
    raw = logits_RV.float()
    edited = _edit(raw, batch)
    peak, token = edited.max(dim=-1)  # the first of equal logits
    if not batch.all_greedy:
        token = torch.where(batch.temperature > 0, _sample_tokens(edited, peak, batch), token)
    if edited is not raw:
        token = torch.where(peak == -torch.inf, raw.argmax(-1), token)
    return _with_logprobs(processed_scores(edited, token, batch) if batch.processed else raw, token, batch)


def _edit(raw: Tensor, batch: SamplingBatch) -> Tensor:
    """Return a copy of the logits with penalties and biases applied; `raw` itself if the batch has none."""
    if batch.penalties is None and batch.bias is None:
        return raw
    edited = raw.clone()
    if batch.penalties is not None:
        apply_penalties(edited, batch.penalties)
    if batch.bias is not None:
        apply_bias(edited, batch.bias)
    return edited


def _sample_tokens(logits_RV: Tensor, peak_R: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample a token for every row from float32 logits, with filters; `peak_R` are the largest logits."""
    safe_temperature_R = safe_temperature(batch.temperature)
    # Subtracting the peak before the division keeps a tiny temperature from producing +inf.
    weight = (logits_RV - peak_R.unsqueeze(-1)).div_(safe_temperature_R.unsqueeze(-1)).exp_()
    first, second = uniforms(batch.seed, batch.sample, batch.position)
    token = invert_cdf(weight, first)
    if batch.filters is None:
        return token
    return resample_filtered(token, logits_RV, weight, safe_temperature_R, second, batch.filters)


def _with_logprobs(raw_RV: Tensor, token_R: Tensor, batch: SamplingBatch) -> Sampled:
    """Return the tokens with their log-probabilities and the top log-probabilities under the logits `raw_RV`."""
    log_sum_R = log_sum_exp(raw_RV)
    # A row whose logits are all −inf gets log-probabilities of −inf instead of NaN.
    log_sum_R = torch.where(log_sum_R == -torch.inf, 0.0, log_sum_R)
    logprob = raw_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1) - log_sum_R
    return Sampled(token_R, logprob, *top_logprobs(raw_RV, log_sum_R, batch))
