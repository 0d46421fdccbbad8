"""Resample rows with penalties or biases: copy only these rows to float32, edit the copies, and sample again.

Only the device knows how many rows have a bias, but the host knows an upper bound. The list of row numbers has that
length and is padded with the number of a row that does not exist. So the host never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Filters, LogitBias, SamplingBatch
from tok_kernels.sampling.reference.edits import apply_bias
from tok_kernels.sampling.triton.block_sampling import RandomKeys, SampledRows, sample_blocks
from tok_kernels.sampling.triton.filters import resample_filtered
from tok_kernels.sampling.triton.penalties import penalise

_ENTRIES = 1 << 27  # logits edited at once, which limits the memory


def resample_edited(
    token_R: Tensor, logits_RV: Tensor, keys: RandomKeys, batch: SamplingBatch, whole: SampledRows
) -> Tensor:
    """Return the tokens; rows that have penalties or biases are resampled from their edited logits.

    A row in which penalties and biases leave no possible token takes the token with its largest raw logit. With
    `batch.processed`, log-probabilities and sums of the rows in `whole` change in place to those of edited logits.
    """
    rows, vocabulary = logits_RV.shape
    # The padding row has the number `rows`.
    result = torch.cat((token_R, token_R.new_zeros(1)))
    logprob_R1, log_sum_R1 = (torch.cat((x, x.new_zeros(1))) for x in (whole.logprob, whole.log_sum))
    for index in torch.split(_edited_rows(batch, rows), max(1, _ENTRIES // max(vocabulary, 1))):
        present = index.clamp(max=rows - 1)
        raw = logits_RV.index_select(0, present)
        edited = edit_rows(raw, index, rows, batch)
        own = keys.rows(present)
        sampled = sample_blocks(edited, own, greedy=batch.all_greedy, processed=batch.processed)
        token = sampled.token
        if batch.filters is not None and not batch.all_greedy:
            filters = chunk_filters(batch.filters, index, rows)
            token = resample_filtered(edited, sampled, own, filters, processed=batch.processed)
        peak = sampled.sums[0].amax(-1)
        result[index] = torch.where(peak == -torch.inf, raw.argmax(-1), token)
        if batch.processed:
            logprob_R1[index], log_sum_R1[index] = sampled.logprob, sampled.log_sum
    if batch.processed:
        whole.logprob.copy_(logprob_R1[:rows])
        whole.log_sum.copy_(log_sum_R1[:rows])
    return result[:rows]


def _edited_rows(batch: SamplingBatch, rows: int) -> Tensor:
    """Return the numbers of the rows with penalties or biases, each once, in rising order, padded with `rows`."""
    parts = [] if batch.penalties is None else [batch.penalties.rows]
    parts += [] if batch.bias is None else [batch.bias.row]
    listed = torch.cat(parts)
    length = min(rows, listed.shape[0])
    has_edit = torch.zeros(rows, dtype=torch.bool, device=listed.device).index_fill_(0, listed, True)
    place = torch.where(has_edit, has_edit.cumsum(0) - 1, length)
    padded = torch.full((length + 1,), rows, device=listed.device)
    number = torch.arange(rows, device=listed.device)
    return padded.scatter_(0, place, torch.where(has_edit, number, rows))[:length]


def edit_rows(raw: Tensor, index: Tensor, rows: int, batch: SamplingBatch) -> Tensor:
    """Return the rows of the chunk in float32, with penalties and biases applied."""
    count = index.shape[0]
    # The extra last row receives the biases of rows outside the chunk.
    edited = torch.empty((count + 1, raw.shape[1]), dtype=torch.float32, device=raw.device)
    edited[:count] = raw
    edited[count:].fill_(0.0)
    if batch.penalties is not None:
        penalise(edited[:count], batch.penalties, _entries(batch.penalties.rows, index, rows))
    if batch.bias is not None:
        place = torch.full((rows + 1,), count, device=index.device)
        place[index] = torch.arange(count, device=index.device)
        apply_bias(edited, LogitBias(place[batch.bias.row], batch.bias.token, batch.bias.value))
    return edited[:count]


def chunk_filters(filters: Filters, index: Tensor, rows: int) -> Filters:
    """Return filters for every row of the chunk; they keep all tokens of a row that has no filter."""
    if not len(filters.rows):
        return filters
    at = _entries(filters.rows, index, rows)
    entry, has_filter = at.clamp(min=0), at >= 0
    return Filters(
        rows=torch.arange(index.shape[0], device=index.device),
        top_k=torch.where(has_filter, filters.top_k[entry], 0),
        top_p=torch.where(has_filter, filters.top_p[entry], 1.0),
        min_p=torch.where(has_filter, filters.min_p[entry], 0.0),
    )


def _entries(listed: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return the index in `listed` of each row of the chunk, int64; −1 if the row is absent."""
    place = torch.full((rows + 1,), -1, device=index.device)
    place[listed] = torch.arange(listed.shape[0], device=index.device)
    return place[index]
