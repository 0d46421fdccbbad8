"""Embed a list of prompts in one call; if one request fails, abort the others."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, get_args

import numpy as np

from tok_core.engine.checks import check_tenant, salt_of
from tok_core.engine.open_requests import OpenRequest, Sink, StreamedTokens
from tok_core.errors import EngineError, InvalidField
from tok_core.messages import Embedded, Finished, Float32, Int32, Progress, Scores
from tok_core.outputs import Completion, EmbeddingOutput, Ending, Pooling
from tok_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tok_core.engine.core import EngineCore


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
            self._count_end(0)

    def runs(self, samples: range) -> bool:
        return not self.ended()

    def restart(self, samples: range) -> bool:
        return True

    def tokens_so_far(self, index: int) -> int | None:
        return 0

    def abort(self, reason: Ending) -> None:
        self.fail(EngineError("the embedding was aborted"))

    def _completions(self) -> list[Completion]:
        return []

    def embedding(self, *, normalize: bool, dimensions: int | None) -> EmbeddingOutput:
        """Return the embedding. The request must have ended without error."""
        assert self._vector is not None, "an embedding comes no later than the end of its request"
        return EmbeddingOutput(self.prompt, truncated(self._vector, normalize, dimensions), self.cached_tokens)


def truncated(vector: Float32, normalize: bool, dimensions: int | None) -> Float32:
    """Return the first `dimensions` of the vector, scaled to length 1 if `normalize`; zeros stay zeros."""
    part = vector[:dimensions].astype(np.float32)
    length = float(np.linalg.norm(part.astype(np.float64)))
    result: Float32 = (part / length).astype(np.float32) if normalize and length > 0 else part
    return result


def check_embedding(pooling: str, dimensions: int | None, hidden_size: int) -> Pooling:
    """Return the pooling. Raise InvalidField for an unknown one, or for more dimensions than `hidden_size`."""
    if pooling not in POOLINGS:
        raise InvalidField("pooling", pooling, f"one of {', '.join(map(repr, POOLINGS))}")
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= hidden_size):
        raise InvalidField("dimensions", dimensions, f"integers from 1 to {hidden_size}, the model's hidden size")
    return pooling


PROMPTS_PER_TURN = 64  # prompts submitted before other tasks of the event loop get a turn


class Embedder:
    """Embedder of the prompts of one call. The constructor raises InvalidField before any request is submitted."""

    def __init__(
        self,
        core: EngineCore,
        prompts: Sequence[str | list[int]],
        pooling: str,
        normalize: bool,
        dimensions: int | None,
        priority: int,
        tenant: str,
        cache_salt: str | None,
    ) -> None:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidField("prompts", prompts, "a list of prompts")
        self._core = core
        self._pooling = check_embedding(pooling, dimensions, core.info.hidden_size)
        check_tenant(tenant)
        self._caller = tenant, salt_of(cache_salt)
        self._normalize, self._dimensions = normalize, dimensions
        self._params = SamplingParams(max_tokens=0, seed=0, priority=priority)
        self._prompts = [self._checked(index, prompt) for index, prompt in enumerate(prompts)]
        self._requests: list[EmbedRequest] = []
        self._left: set[int] = set()  # requests that have not ended

    def run(self) -> list[EmbeddingOutput]:
        """Return one output per prompt, in order; blocks."""
        arrived: queue.SimpleQueue[Sequence[OpenRequest]] = queue.SimpleQueue()
        with self._aborting():
            for ids, tokens in self._prompts:
                self._add(self._core.embed(ids, self._params, self._pooling, arrived.put, tokens, *self._caller))
            while self._left:
                self._note(arrived.get())
        return self._outputs()

    async def run_async(self) -> list[EmbeddingOutput]:
        """Return one output per prompt, in order."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Sequence[OpenRequest]]()

        def notify_loop(requests: Sequence[OpenRequest]) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(arrived.put_nowait, requests)

        with self._aborting():
            for index, (ids, tokens) in enumerate(self._prompts):
                self._add(self._core.embed(ids, self._params, self._pooling, notify_loop, tokens, *self._caller))
                if index % PROMPTS_PER_TURN == PROMPTS_PER_TURN - 1:
                    await asyncio.sleep(0)
            while self._left:
                self._note(await arrived.get())
        return self._outputs()

    def _checked(self, index: int, prompt: str | list[int]) -> tuple[list[int], Int32]:
        """Return the prompt's token ids, as a list and as an array."""
        try:
            ids = self._core.encode(prompt)
            return ids, self._core.check(ids, self._params)
        except InvalidField as error:
            raise error.renamed(f"prompts[{index}]") from None

    def _add(self, request: EmbedRequest) -> None:
        self._requests.append(request)
        self._left.add(request.rid)

    def _note(self, requests: Sequence[OpenRequest]) -> None:
        for request in requests:
            if request.error is not None:
                raise request.error
            if request.ended():
                self._left.discard(request.rid)

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort the requests that have not ended when the block is left."""
        try:
            yield
        finally:
            self._core.abort_all(self._left)

    def _outputs(self) -> list[EmbeddingOutput]:
        return [request.embedding(normalize=self._normalize, dimensions=self._dimensions) for request in self._requests]
