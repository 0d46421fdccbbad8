"""Sample tokens by one pass over the logits; only rows with masks, penalties, biases or filters are read again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tok_kernels.batch import Sampled, SamplingBatch
from tok_kernels.sampling.reference.filters import processed_scores
from tok_kernels.sampling.top_logprobs import check_top_logprobs, no_top_logprobs, top_logprobs
from tok_kernels.sampling.triton.block_sampling import RandomKeys, sample_blocks
from tok_kernels.sampling.triton.edits import chunk_filters, edit_rows, resample_edited
from tok_kernels.sampling.triton.filters import resample_filtered
from tok_kernels.sampling.triton.masks import apply_masks
from tok_kernels.sampling.triton.shards import sample_shards

_TOP_ROWS = 256  # rows whose processed logits are in memory at once


def sample(logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
    """Compute `Backend.sample`; logits may be float16, too.

    The token equals the reference's, except where rounding decides.
    """
    rows, vocabulary = logits_RV.shape
    check_top_logprobs(batch, vocabulary)
    logits = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    keys = RandomKeys.from_batch(batch)
    if batch.shards is not None:
        token, logprob = sample_shards(logits, keys, batch.shards, greedy=batch.all_greedy, processed=batch.processed)
        return Sampled(token, logprob, *no_top_logprobs(rows, logits.device))
    if batch.masks is not None:
        apply_masks(logits, batch.masks)
    sampled = sample_blocks(logits, keys, greedy=batch.all_greedy, processed=batch.processed)
    token, logprob = sampled.token, sampled.logprob
    if batch.filters is not None and not batch.all_greedy:
        token = resample_filtered(logits, sampled, keys, batch.filters, processed=batch.processed)
    if rows and not (batch.penalties is None and batch.bias is None):
        token = resample_edited(token, logits, keys, batch, sampled)
    if batch.processed:
        return Sampled(token, logprob, *_processed_top_logprobs(logits, token, sampled.log_sum, batch))
    if token is not sampled.token:
        changed = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1).float() - sampled.log_sum
        # A row's rounding must not depend on whether another row has filters or edits.
        logprob = torch.where(token == sampled.token, logprob, changed)
    return Sampled(token, logprob, *top_logprobs(logits, sampled.log_sum, batch))


def _processed_top_logprobs(
    logits_RV: Tensor, token_R: Tensor, log_sum_R: Tensor, batch: SamplingBatch
) -> tuple[Tensor, Tensor]:
    """Return `Sampled.top_token` and `Sampled.top_logprob` after temperature, penalties, biases and filters.

    `token_R` are the sampled tokens. `log_sum_R` is the log-sum-exp of each row's processed logits.
    """
    rows, device = len(logits_RV), logits_RV.device
    top_token, top_logprob = no_top_logprobs(rows, device)
    if not batch.top_logprobs:
        return top_token, top_logprob
    top_token, top_logprob = (x.new_zeros((rows, batch.top_logprobs)) for x in (top_token, top_logprob))
    listed = torch.arange(rows, device=device) if batch.top_rows is None else batch.top_rows
    for index in torch.split(listed, _TOP_ROWS):
        edited = edit_rows(logits_RV.index_select(0, index), index, rows, batch)
        filters = None if batch.filters is None else chunk_filters(batch.filters, index, rows)
        chunk = replace(
            batch,
            temperature=batch.temperature.index_select(0, index),
            filters=filters,
            top_rows=None,
        )
        scores = processed_scores(edited, token_R.index_select(0, index), chunk)
        top_token[index], top_logprob[index] = top_logprobs(scores, log_sum_R.index_select(0, index), chunk)
    return top_token, top_logprob
