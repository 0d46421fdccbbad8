"""EmbedRequest: state of an open request for the embedding of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import numpy as np

from tok_core.engine.requests.request_state import OpenRequest, Sink, StreamedTokens
from tok_core.errors import EngineError, InvalidField
from tok_core.messages import Embedded, Finished, Float32, Progress, Scores
from tok_core.outputs import Completion, EmbeddingOutput, Ending, Pooling
from tok_core.sampling_params import SamplingParams

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class EmbedRequest(OpenRequest):
    """A request to embed one prompt: `params.max_tokens` is 0. Its owner is notified once, when it has ended."""

    each_token = False

    def __init__(
        self, rid: int, request_id: str, prompt: list[int], params: SamplingParams, pooling: Pooling, sink: Sink
    ) -> None:
        super().__init__(rid, request_id, prompt, params, sink)
        self.pooling = pooling
        self._vector: Float32 | None = None

    def add_prompt_output(self, output: Scores | Embedded) -> None:
        if isinstance(output, Embedded):
            self._vector = output.vector

    def advance(self, streamed: StreamedTokens, ends: Mapping[int, Finished], progress: Progress) -> None:
        for _ in ends:
            self._count_end()

    def runs(self, samples: range) -> bool:
        return not self.ended()

    def restart(self, samples: range) -> bool:
        return True

    def abort(self, reason: Ending) -> None:
        self.fail(EngineError("the embedding was aborted"))

    def _completions(self) -> list[Completion]:
        return []

    def embedding(self, *, normalize: bool, dimensions: int | None) -> EmbeddingOutput:
        """Return the embedding. The request must have ended without error."""
        assert self._vector is not None, "an embedding comes no later than the end of its request"
        return EmbeddingOutput(self.prompt, cut(self._vector, normalize, dimensions), self.cached_tokens)


def cut(vector: Float32, normalize: bool, dimensions: int | None) -> Float32:
    """Return the first `dimensions` of the vector, scaled to length 1 if `normalize`; zeros stay zeros."""
    part = vector[:dimensions].astype(np.float32)
    length = float(np.linalg.norm(part.astype(np.float64)))
    found: Float32 = (part / length).astype(np.float32) if normalize and length > 0 else part
    return found


def check_embedding(pooling: str, dimensions: int | None, hidden_size: int) -> Pooling:
    """Return the pooling. Raise InvalidField for an unknown one, or for more dimensions than `hidden_size`."""
    if pooling not in POOLINGS:
        raise InvalidField("pooling", pooling, f"one of {', '.join(map(repr, POOLINGS))}")
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= hidden_size):
        raise InvalidField("dimensions", dimensions, f"integers from 1 to {hidden_size}, the model's hidden size")
    return pooling
