"""Resample rows with penalties or biases: copy these rows to float32, edit the copies, and sample again.

Only the device knows how many rows have a bias. To avoid a synchronisation, the list of row numbers is as long as the
host's upper bound. It is padded with R, the number of rows, which is the number of no row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Filters, LogitBias, SamplingBatch
from tok_kernels.sampling.reference.edits import apply_bias
from tok_kernels.sampling.triton.block_sampling import RandomKeys, SampledRows, sample_blocks
from tok_kernels.sampling.triton.filters import resample_filtered
from tok_kernels.sampling.triton.penalties import apply_penalties

_MAX_CHUNK_ENTRIES = 1 << 26  # logits edited at once; limits the memory to 256 MiB


def resample_edited(
    token_R: Tensor, logits_RV: Tensor, keys: RandomKeys, batch: SamplingBatch, sampled: SampledRows
) -> Tensor:
    """Return `token_R` with the tokens of rows that have penalties or biases resampled from their edited logits.

    A row in which penalties and biases leave no possible token takes the token with its largest raw logit. With
    `batch.processed`, log-probabilities and sums of these rows in `sampled` change in place to those of edited logits.
    """
    rows, vocabulary = logits_RV.shape
    # One entry more, to which padding writes.
    result = torch.cat((token_R, token_R.new_zeros(1)))
    logprob_R1, log_sum_R1 = (torch.cat((x, x.new_zeros(1))) for x in (sampled.logprob, sampled.log_sum))
    for index in torch.split(_edited_rows(batch, rows), max(1, _MAX_CHUNK_ENTRIES // max(vocabulary, 1))):
        existing = index.clamp(max=rows - 1)
        raw = logits_RV.index_select(0, existing)
        edited = edit_rows(raw, index, rows, batch)
        chunk_keys = keys.select(existing)
        resampled = sample_blocks(edited, chunk_keys, greedy=batch.all_greedy, processed=batch.processed)
        token = resampled.token
        if batch.filters is not None and not batch.all_greedy:
            filters = chunk_filters(batch.filters, index, rows)
            token = resample_filtered(edited, resampled, chunk_keys, filters, processed=batch.processed)
        peak = resampled.blocks.peaks.amax(-1)
        result[index] = torch.where(peak == -torch.inf, raw.argmax(-1), token)
        if batch.processed:
            logprob_R1[index], log_sum_R1[index] = resampled.logprob, resampled.log_sum
    if batch.processed:
        sampled.logprob.copy_(logprob_R1[:rows])
        sampled.log_sum.copy_(log_sum_R1[:rows])
    return result[:rows]


def _edited_rows(batch: SamplingBatch, rows: int) -> Tensor:
    """Return the numbers of the rows with penalties or biases, ascending and unique, padded with `rows`: int64."""
    parts = [] if batch.penalties is None else [batch.penalties.rows]
    parts += [] if batch.bias is None else [batch.bias.row]
    listed = torch.cat(parts)
    length = min(rows, listed.shape[0])
    has_edit = torch.zeros(rows, dtype=torch.bool, device=listed.device).index_fill_(0, listed, True)
    target = torch.where(has_edit, has_edit.cumsum(0) - 1, length)
    padded = torch.full((length + 1,), rows, device=listed.device)
    number = torch.arange(rows, device=listed.device)
    return padded.scatter_(0, target, torch.where(has_edit, number, rows))[:length]


def edit_rows(raw: Tensor, index: Tensor, rows: int, batch: SamplingBatch) -> Tensor:
    """Return the logits of the rows `index` in float32, with penalties and biases applied.

    `raw` holds the logits of these rows. The batch has `rows` rows.
    """
    count = index.shape[0]
    # The last row is a dummy: it receives the biases of rows outside the chunk.
    edited = torch.empty((count + 1, raw.shape[1]), dtype=torch.float32, device=raw.device)
    edited[:count] = raw
    edited[count:].fill_(0.0)
    if batch.penalties is not None:
        apply_penalties(edited[:count], batch.penalties, _index_in(batch.penalties.rows, index, rows))
    if batch.bias is not None:
        chunk_index = torch.full((rows + 1,), count, device=index.device)
        chunk_index[index] = torch.arange(count, device=index.device)
        apply_bias(edited, LogitBias(chunk_index[batch.bias.row], batch.bias.token, batch.bias.value))
    return edited[:count]


def chunk_filters(filters: Filters, index: Tensor, rows: int) -> Filters:
    """Return filters for all rows `index`, numbered from 0; rows without a filter get values that keep all tokens."""
    if not len(filters.rows):
        return filters
    position = _index_in(filters.rows, index, rows)
    entry, has_filter = position.clamp(min=0), position >= 0
    return Filters(
        rows=torch.arange(index.shape[0], device=index.device),
        top_k=torch.where(has_filter, filters.top_k[entry], 0),
        top_p=torch.where(has_filter, filters.top_p[entry], 1.0),
        min_p=torch.where(has_filter, filters.min_p[entry], 0.0),
    )


def _index_in(listed: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return for each row number in `index` its index in `listed`, int64; −1 if it is absent."""
    position_of_row = torch.full((rows + 1,), -1, device=index.device)
    position_of_row[listed] = torch.arange(listed.shape[0], device=index.device)
    return position_of_row[index]
