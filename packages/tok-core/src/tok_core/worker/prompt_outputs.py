"""Compute what requests ask of their prompts: log-probabilities of prompt tokens, and sums of hidden states.

`prompt_output_arrays` runs on the host, before the step's arrays are staged. `compute_prompt_outputs` runs on the last
pipeline stage, after the step's tokens are sampled.

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
from tok_core.worker.step_tensors import concatenated_ranges
from tok_kernels import log_sum_exp, top_values

MAX_SCORED_ROWS = 256  # rows scored at once; bounds the memory of their logits in float32
MAX_POOLED_ROWS = 512  # rows normed and summed at once; bounds the memory of their hidden states in float32


class PromptOutputs(NamedTuple):
    """`PromptValues` on the device: float32 and int32 `[Q]`, int32 and float32 `[Q, K]`, float32 `[E, N]`."""

    logprob: Tensor
    rank: Tensor
    top_token: Tensor
    top_logprob: Tensor
    pooled: Tensor


class _PoolingBlock(NamedTuple):
    """Block of at most MAX_POOLED_ROWS consecutive pooled rows; the first and last chunk may be in other blocks, too.

    rows       slice of the P pooled rows
    chunks     slice of the E chunks to which the rows belong
    row_count  number of rows of each of these chunks in the block
    """

    rows: slice
    chunks: slice
    row_count: Int32


def prompt_output_arrays(step: StepInput) -> dict[str, np.ndarray]:
    """Return the host arrays that `compute_prompt_outputs` needs, by name; empty if the step has no prompt outputs."""
    prompt_outputs = step.prompts
    if prompt_outputs is None:
        return {}
    chunk_end = len(step.decode_slot) + np.cumsum(step.prefill_count)  # among the step's T rows
    scored_start = chunk_end[prompt_outputs.scored] - step.prefill_count[prompt_outputs.scored]
    pooled_start = chunk_end[prompt_outputs.pooled] - prompt_outputs.pooled_count
    blocks = _pooling_blocks(prompt_outputs.pooled_count)
    return {
        "scored_row": array(concatenated_ranges(scored_start, prompt_outputs.scored_count)),
        "scored_token": prompt_outputs.scored_token,
        "pooled_row": array(concatenated_ranges(pooled_start, prompt_outputs.pooled_count)),
        "pooled_count": np.concatenate([EMPTY, *(block.row_count for block in blocks)]),
    }


def compute_prompt_outputs(
    model: CausalLM, staged: Mapping[str, Tensor], prompt_outputs: RequestedPromptOutputs, x_TN: Tensor
) -> PromptOutputs:
    """Compute the requested outputs from the residual stream after the last layer, `x_TN`.

    `staged` has `prompt_output_arrays(step)` on the device. All ranks of a stage call this and get the same result.
    """
    row_Q, token_Q = staged["scored_row"].long(), staged["scored_token"].long()
    blocks = [slice(start, start + MAX_SCORED_ROWS) for start in range(0, max(len(row_Q), 1), MAX_SCORED_ROWS)]
    scores = [_score(model, x_TN[row_Q[block]], token_Q[block], prompt_outputs.top_logprobs) for block in blocks]
    logprob, rank, top_token, top_logprob = (torch.cat(values) for values in zip(*scores, strict=True))
    pooled_EN = _pool(model, staged, prompt_outputs.pooled_count, x_TN)
    return PromptOutputs(logprob, rank, top_token, top_logprob, pooled_EN)


def _score(model: CausalLM, x_QN: Tensor, token_Q: Tensor, top_logprobs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probability and rank of each row's token, and the top tokens with their log-probabilities."""
    logits_QV = model.logits(x_QN)
    if model.shards is not None:
        logits_QV = model.shards.whole(logits_QV)
    logits_QV = logits_QV.float()
    lse_Q1 = log_sum_exp(logits_QV).unsqueeze(-1)
    own_Q1 = logits_QV.gather(-1, token_Q.unsqueeze(-1))
    rank_Q = (logits_QV >= own_Q1).sum(-1)
    value, token = top_values(logits_QV, min(top_logprobs, logits_QV.shape[1]))
    return (own_Q1 - lse_Q1).squeeze(-1), rank_Q.int(), token.int(), value - lse_Q1


def _pool(model: CausalLM, staged: Mapping[str, Tensor], count_E: Int32, x_TN: Tensor) -> Tensor:
    """Return the sum of each chunk's normed rows, float32 `[E, N]`; rows of a chunk are added in order."""
    pooled_EN = torch.zeros((len(count_E), x_TN.shape[1]), dtype=torch.float32, device=x_TN.device)
    row_P, block_counts, start = staged["pooled_row"].long(), staged["pooled_count"].long(), 0
    for block in _pooling_blocks(count_E):
        end = start + len(block.row_count)
        normed = model.normed(x_TN[row_P[block.rows]]).float()
        pooled_EN[block.chunks] += torch.segment_reduce(normed, "sum", lengths=block_counts[start:end], unsafe=True)
        start = end
    return pooled_EN


def _pooling_blocks(count_E: Int32) -> list[_PoolingBlock]:
    """Cut the pooled rows, chunk after chunk, into blocks of MAX_POOLED_ROWS; `count_E` has the rows of each chunk.

    In blocks of 4, chunks of `[3, 6]` rows become rows 0:4 (3 of chunk 0, 1 of chunk 1), 4:8 and 8:9 (both chunk 1).
    """
    total_rows = int(count_E.sum())
    return [
        _pooling_block(count_E, first, min(first + MAX_POOLED_ROWS, total_rows))
        for first in range(0, total_rows, MAX_POOLED_ROWS)
    ]


def _pooling_block(count_E: Int32, first: int, last: int) -> _PoolingBlock:
    """Return the block of the pooled rows `first` to `last` − 1."""
    end_E = np.cumsum(count_E)
    start_E = end_E - count_E
    chunks = slice(int(np.searchsorted(end_E, first, "right")), int(np.searchsorted(start_E, last)))
    row_count = np.minimum(end_E[chunks], last) - np.maximum(start_E[chunks], first)
    return _PoolingBlock(slice(first, last), chunks, array(row_count))
