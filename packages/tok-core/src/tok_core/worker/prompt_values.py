"""Compute the requested outputs of a step's prompts: log-probabilities of tokens, and sums of hidden states.

Legend: T tokens of the step, Q rows scored, P rows pooled, E chunks pooled, N hidden size, V vocabulary, K requested
top tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tok_core.messages import EMPTY, Int32, RequestedPromptOutputs, StepInput, array
from tok_core.models import CausalLM
from tok_kernels import log_sum_exp, top_values

MAX_SCORED_ROWS = 256  # rows scored at once; bounds the memory of their logits in fp32
MAX_POOLED_ROWS = 512  # rows normed and summed at once, in fp32


class PromptOutputs(NamedTuple):
    """`PromptValues` on the device: float32 and int32 `[Q]`, int32 and float32 `[Q, K]`, float32 `[E, N]`."""

    logprob: Tensor
    rank: Tensor
    top_token: Tensor
    top_logprob: Tensor
    pooled: Tensor


class _PooledRows(NamedTuple):
    """Pooled rows that are summed together, their chunks, and the number of rows of each chunk."""

    rows: slice
    chunks: slice
    row_count: Int32


def arrays(step: StepInput) -> dict[str, np.ndarray]:
    """Return the host arrays that `compute` needs, by name; empty if the step has no prompt outputs to compute."""
    prompt_outputs = step.prompts
    if prompt_outputs is None:
        return {}
    end = len(step.decode_slot) + np.cumsum(step.prefill_count)
    scored_from = end[prompt_outputs.scored] - step.prefill_count[prompt_outputs.scored]
    return {
        "scored_row": _ranges(scored_from, prompt_outputs.scored_count),
        "scored_token": prompt_outputs.scored_token,
        "pooled_row": _ranges(end[prompt_outputs.pooled] - prompt_outputs.pooled_count, prompt_outputs.pooled_count),
        "pooled_part": np.concatenate([EMPTY, *(part.row_count for part in _parts(prompt_outputs.pooled_count))]),
    }


def compute(
    model: CausalLM, put: Mapping[str, Tensor], prompt_outputs: RequestedPromptOutputs, x_TN: Tensor
) -> PromptOutputs:
    """Compute `prompt_outputs` from the residual stream after the last layer; `put` is `arrays(step)` on the device.

    All ranks of a stage call this and get the same result.
    """
    row_Q, token_Q = put["scored_row"].long(), put["scored_token"].long()
    parts = [
        _score(model, x_TN[row_Q[part]], token_Q[part], prompt_outputs.top_logprobs) for part in _slices(len(row_Q))
    ]
    logprob, rank, top_token, top_logprob = (torch.cat(values) for values in zip(*parts, strict=True))
    return PromptOutputs(logprob, rank, top_token, top_logprob, _pool(model, put, prompt_outputs.pooled_count, x_TN))


def _pool(model: CausalLM, put: Mapping[str, Tensor], count_E: Int32, x_TN: Tensor) -> Tensor:
    """Return the sums of normed rows, MAX_POOLED_ROWS at a time; rows of a chunk are added in order."""
    pooled_EN = torch.zeros((len(count_E), x_TN.shape[1]), dtype=torch.float32, device=x_TN.device)
    row_P, part_count, at = put["pooled_row"].long(), put["pooled_part"].long(), 0
    for part in _parts(count_E):
        count = part_count[at : at + len(part.row_count)]
        normed = model.normed(x_TN[row_P[part.rows]]).float()
        pooled_EN[part.chunks] += torch.segment_reduce(normed, "sum", lengths=count, unsafe=True)
        at += len(part.row_count)
    return pooled_EN


def _score(model: CausalLM, x_QN: Tensor, token_Q: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probability and rank of each row's token, and the top tokens with their log-probabilities."""
    logits_QV = model.logits(x_QN)
    if model.shards is not None:
        logits_QV = model.shards.whole(logits_QV)
    logits_QV = logits_QV.float()
    lse_Q1 = log_sum_exp(logits_QV).unsqueeze(-1)
    own_Q1 = logits_QV.gather(-1, token_Q.unsqueeze(-1))
    rank_Q = (logits_QV >= own_Q1).sum(-1)
    value, token = top_values(logits_QV, min(top, logits_QV.shape[1]))
    return (own_Q1 - lse_Q1).squeeze(-1), rank_Q.int(), token.int(), value - lse_Q1


def _slices(rows: int) -> list[slice]:
    """Return slices of at most MAX_SCORED_ROWS rows; one empty slice if there are no rows."""
    return [slice(start, start + MAX_SCORED_ROWS) for start in range(0, max(rows, 1), MAX_SCORED_ROWS)]


def _parts(count_E: Int32) -> list[_PooledRows]:
    """Return the pooled rows in parts of at most MAX_POOLED_ROWS."""
    end = np.cumsum(count_E)
    rows, parts = int(end[-1]) if len(end) else 0, []
    for first in range(0, rows, MAX_POOLED_ROWS):
        last = min(first + MAX_POOLED_ROWS, rows)
        low, high = np.searchsorted(end, first, "right"), np.searchsorted(end, last) + 1
        inside = np.clip(end[low:high], first, last) - np.clip(end[low:high] - count_E[low:high], first, last)
        parts.append(_PooledRows(slice(first, last), slice(int(low), int(high)), array(inside)))
    return parts


def _ranges(start: np.ndarray, count: Int32) -> Int32:
    """Concatenate the ranges `start[i], …, start[i] + count[i] − 1`."""
    before = np.cumsum(count) - count
    return array(np.arange(count.sum()) + np.repeat(start - before, count))
