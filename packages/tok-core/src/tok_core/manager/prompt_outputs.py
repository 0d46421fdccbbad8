"""Request prompt log-probabilities and embeddings from the worker, and assign the returned values to their requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tok_core.manager.faults import Faults
from tok_core.manager.requests import Request
from tok_core.manager.sequences import SequenceTable
from tok_core.messages import EMPTY, Embedded, PromptValues, RequestedPromptOutputs, Scores, StepInput, array

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


class _Scored(NamedTuple):
    """Tokens of a prompt that a step scores, from position `first` on; valid even if the slot gets another owner."""

    rid: int
    first: int
    tokens: int


class _Pooled(NamedTuple):
    """Part of the embedding of a slot's owner in this epoch: the first part, the last, both or neither."""

    slot: int
    epoch: int
    first: bool
    last: bool


class PromptOutputProcessor:
    """Processor of PromptValues, in the order of their StepInputs; sums the parts of embeddings."""

    def __init__(self, table: SequenceTable, faults: Faults) -> None:
        self.table = table
        self._faults = faults
        self._expected: deque[tuple[list[_Scored], list[_Pooled]]] = deque()

    def expect(self, step: StepInput, prompt_outputs: RequestedPromptOutputs) -> None:
        """Record whose values a step that was sent will return."""
        table, slots, starts = self.table, step.prefill_slot, step.prefill_start
        scored = [
            _Scored(int(table.rid[slots[chunk]]), int(starts[chunk]) + 1, count)
            for chunk, count in zip(prompt_outputs.scored.tolist(), prompt_outputs.scored_count.tolist(), strict=True)
        ]
        pooled = []
        for chunk in prompt_outputs.pooled.tolist():
            slot, end = int(slots[chunk]), int(starts[chunk] + step.prefill_count[chunk])
            request = table.requests[slot]
            assert request is not None
            first = starts[chunk] == 0 or request.pooling == "last"
            pooled.append(_Pooled(slot, int(table.epoch[slot]), first, end == len(request.prompt)))
        self._expected.append((scored, pooled))

    def take(self, values: PromptValues) -> tuple[list[Scores], list[Embedded]]:
        """Return the scores and embeddings to report from a step's values."""
        scored, pooled = self._expected.popleft()
        scores, at = [], 0
        for rid, first, count in scored:
            rows = slice(at, at := at + count)
            columns = (values.logprob, values.rank, values.top_token, values.top_logprob)
            scores.append(Scores(rid, first, *(column[rows] for column in columns)))
        found = []
        for part, vector in zip(pooled, values.pooled, strict=True):
            try:
                embedded = self._add(part, vector)
            except Exception as error:
                self._faults.add(int(self.table.rid[part.slot]), error)
                continue
            if embedded is not None:
                found.append(embedded)
        return scores, found

    def _add(self, part: _Pooled, vector: np.ndarray) -> Embedded | None:
        """Add a part and return the embedding if this was its last. Drop parts of preempted or ended sequences."""
        request = self.table.requests[part.slot]
        if request is None or self.table.epoch[part.slot] != part.epoch:
            return None
        request.pooled = vector if part.first or request.pooled is None else request.pooled + vector
        if not part.last:
            return None
        total, request.pooled = request.pooled, None
        count = len(request.prompt) if request.pooling == "mean" else 1
        return Embedded(request.rid, total / np.float32(count))
