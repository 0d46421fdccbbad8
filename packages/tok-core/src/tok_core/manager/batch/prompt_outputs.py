"""Select the chunk rows of a step that yield requested prompt outputs: log-probabilities and embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tok_core.manager.sequences import Request, SequenceTable
from tok_core.messages import EMPTY, RequestedPromptOutputs, array

Chunk = tuple[int, int, int]
"""Slot, start and number of tokens of a prefill chunk."""


def requested_prompt_outputs(
    table: SequenceTable, chunks: Sequence[Chunk], asking: Sequence[int]
) -> RequestedPromptOutputs | None:
    """Return the prompt outputs that the `asking` ones of the step's chunks have to yield; None if there are none."""
    scored, pooled = [], []
    for index in asking:
        slot, start, count = chunks[index]
        request = table.requests[slot]
        assert request is not None
        if request.params.prompt_logprobs is not None and start + 1 < len(request.prompt):
            following = request.prompt[start + 1 : start + count + 1]
            scored.append((index, following, request.params.prompt_logprobs))
        if rows := _pooled_rows(request, start + count, count):
            pooled.append((index, rows))
    if not scored and not pooled:
        return None
    return RequestedPromptOutputs(
        scored=array([index for index, _, _ in scored]),
        scored_count=array([len(following) for _, following, _ in scored]),
        scored_token=np.concatenate([following for _, following, _ in scored]) if scored else EMPTY,
        top_logprobs=max((top for _, _, top in scored), default=0),
        pooled=array([index for index, _ in pooled]),
        pooled_count=array([rows for _, rows in pooled]),
    )


def _pooled_rows(request: Request, end: int, count: int) -> int:
    """Return how many rows, the last of the `count` before position `end`, are part of the request's embedding."""
    if request.pooling == "mean":
        return count
    return int(request.pooling == "last" and end == len(request.prompt))
