"""Rows with penalties, biases or filters: only these are copied to float32, edited and drawn from there.

How many rows have a bias only the device knows. Their number has a bound, though; a list of that length is
filled up with a row that does not exist, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tok_kernels.batch import Filters, LogitBias, Penalties, SamplingBatch
from tok_kernels.reference.edits import apply_bias, apply_filters, apply_penalties
from tok_kernels.triton.draw import Keys, draw

_ENTRIES = 1 << 25  # edited at a time, which bounds the memory


def redraw(token_R: Tensor, logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
    """The tokens, with those of the rows that ask for edits drawn anew from their edited logits.

    A row in which penalties and bias leave no token possible takes its largest raw logit.
    """
    rows, vocabulary = logits_RV.shape
    keys = Keys.of(batch)
    # The row that does not exist is number `rows`.
    result = torch.cat((token_R, token_R.new_zeros(1)))
    for index, filters in _chunks(batch, rows, max(1, _ENTRIES // max(vocabulary, 1))):
        present = index.clamp(max=rows - 1)
        raw = logits_RV.index_select(0, present)
        edited = _edit(raw, index, rows, batch)
        peak = edited.amax(-1)
        own = keys.rows(present)
        drawn = draw(*_filtered(edited, peak, own, filters), greedy=batch.all_greedy).token
        result[index] = torch.where(peak == -torch.inf, raw.argmax(-1), drawn)
    return result[:rows]


def _chunks(batch: SamplingBatch, rows: int, most: int) -> Iterator[tuple[Tensor, Filters | None]]:
    """Row numbers, at most `most` at a time: rows with filters, then the other edited ones and padding."""
    filters, skip = batch.filters, None
    if filters is not None and not batch.all_greedy:
        skip = filters.rows
        for begin in range(0, skip.shape[0], most):
            part = slice(begin, begin + most)
            yield skip[part], Filters(skip[part], filters.top_k[part], filters.top_p[part], filters.min_p[part])
    asking = [] if batch.penalties is None else [batch.penalties.rows]
    asking += [] if batch.bias is None else [batch.bias.row]
    if asking:
        others = _distinct(torch.cat(asking), skip, rows)
        for begin in range(0, others.shape[0], most):
            yield others[begin : begin + most], None


def _distinct(asking: Tensor, skip: Tensor | None, rows: int) -> Tensor:
    """Each row number once but for those in `skip`, in rising order, then `rows` as padding."""
    length = min(rows, asking.shape[0])
    asks = torch.zeros(rows, dtype=torch.bool, device=asking.device).index_fill_(0, asking, True)
    if skip is not None:
        asks.index_fill_(0, skip, False)
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
    edited[count] = 0.0
    if batch.penalties is not None:
        apply_penalties(edited, _chunk_penalties(batch.penalties, index, rows))
    if batch.bias is not None:
        place = torch.full((rows + 1,), count, device=index.device)
        place[index] = torch.arange(count, device=index.device)
        apply_bias(edited, LogitBias(place[batch.bias.row], batch.bias.token, batch.bias.value))
    return edited[:count]


def _chunk_penalties(penalties: Penalties, index: Tensor, rows: int) -> Penalties:
    """One entry a row of the chunk, with no effect on a row that asks for none."""
    asking = penalties.rows.shape[0]
    place = torch.full((rows + 1,), -1, device=index.device)
    place[penalties.rows] = torch.arange(asking, device=index.device)
    at = place[index]
    entry, asks = at.clamp(min=0), at >= 0
    return Penalties(
        rows=torch.arange(index.shape[0], device=index.device),
        in_prompt=penalties.in_prompt[entry],
        in_output=penalties.in_output[entry],
        presence=torch.where(asks, penalties.presence[entry], 0.0),
        frequency=torch.where(asks, penalties.frequency[entry], 0.0),
        repetition=torch.where(asks, penalties.repetition[entry], 1.0),
    )


def _filtered(edited: Tensor, peak: Tensor, keys: Keys, filters: Filters | None) -> tuple[Tensor, Keys]:
    """The logits and keys to draw with: where there are filters, those left, already scaled by the temperature."""
    if filters is None:
        return edited, keys
    limits = torch.finfo(torch.float32)
    heat = torch.where(keys.temperature > 0, keys.temperature, 1.0).clamp(limits.tiny, limits.max)
    score = (edited - peak.unsqueeze(-1)).div_(heat.unsqueeze(-1))
    count = torch.arange(score.shape[0], device=score.device)
    apply_filters(score, Filters(count, filters.top_k, filters.top_p, filters.min_p))
    scaled = (keys.temperature > 0).to(keys.temperature.dtype)
    return score, Keys(scaled, keys.seed, keys.sample, keys.position)
