"""Rows with penalties or biases: copy only these to float32, edit them there, and sample them again.

How many rows have a bias only the device knows. Their number has a bound, though; a list of that length is
filled up with a row that does not exist, so that nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Filters, LogitBias, SamplingBatch
from tok_kernels.sampling.reference.edits import apply_bias
from tok_kernels.sampling.triton.block_sampling import RandomKeys, sample_blocks
from tok_kernels.sampling.triton.filters import resample_filtered
from tok_kernels.sampling.triton.penalties import penalise

_ENTRIES = 1 << 27  # edited at a time, which bounds the memory


def resample_edited(token_R: Tensor, logits_RV: Tensor, keys: RandomKeys, batch: SamplingBatch) -> Tensor:
    """The tokens, with those of the rows that ask for penalties or bias drawn anew from their edited logits.

    A row in which these leave no token possible takes its largest raw logit.
    """
    rows, vocabulary = logits_RV.shape
    # The row that does not exist is number `rows`.
    result = torch.cat((token_R, token_R.new_zeros(1)))
    for index in torch.split(_asking(batch, rows), max(1, _ENTRIES // max(vocabulary, 1))):
        present = index.clamp(max=rows - 1)
        raw = logits_RV.index_select(0, present)
        edited = _edit(raw, index, rows, batch)
        own = keys.rows(present)
        drawn = sample_blocks(edited, own, greedy=batch.all_greedy)
        token = drawn.token
        if batch.filters is not None and not batch.all_greedy:
            token = resample_filtered(edited, drawn, own, _chunk_filters(batch.filters, index, rows))
        peak = drawn.sums[0].amax(-1)
        result[index] = torch.where(peak == -torch.inf, raw.argmax(-1), token)
    return result[:rows]


def _asking(batch: SamplingBatch, rows: int) -> Tensor:
    """Each number of a row that asks once, in rising order, then `rows` as padding."""
    parts = [] if batch.penalties is None else [batch.penalties.rows]
    parts += [] if batch.bias is None else [batch.bias.row]
    asking = torch.cat(parts)
    length = min(rows, asking.shape[0])
    asks = torch.zeros(rows, dtype=torch.bool, device=asking.device).index_fill_(0, asking, True)
    place = torch.where(asks, asks.cumsum(0) - 1, length)
    padded = torch.full((length + 1,), rows, device=asking.device)
    number = torch.arange(rows, device=asking.device)
    return padded.scatter_(0, place, torch.where(asks, number, rows))[:length]


def _edit(raw: Tensor, index: Tensor, rows: int, batch: SamplingBatch) -> Tensor:
    """The chunk's rows in float32 with penalties and biases applied."""
    count = index.shape[0]
    # One row more takes the biases of rows outside the chunk.
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


def _chunk_filters(filters: Filters, index: Tensor, rows: int) -> Filters:
    """One entry a row of the chunk, with no effect on a row that asks for none."""
    if not len(filters.rows):
        return filters
    at = _entries(filters.rows, index, rows)
    entry, asks = at.clamp(min=0), at >= 0
    return Filters(
        rows=torch.arange(index.shape[0], device=index.device),
        top_k=torch.where(asks, filters.top_k[entry], 0),
        top_p=torch.where(asks, filters.top_p[entry], 1.0),
        min_p=torch.where(asks, filters.min_p[entry], 0.0),
    )


def _entries(asking: Tensor, index: Tensor, rows: int) -> Tensor:
    """Where among those `asking` each row of the chunk stands, int64; −1 where it does not."""
    place = torch.full((rows + 1,), -1, device=index.device)
    place[asking] = torch.arange(asking.shape[0], device=index.device)
    return place[index]
