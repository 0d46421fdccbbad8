"""Embedder: embed a list of prompts in one call; if one request fails, abort the others."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tok_core.engine.checks import check_tenant, salt_of
from tok_core.engine.requests import EmbedRequest, OpenRequest, check_embedding
from tok_core.errors import InvalidField
from tok_core.messages import Int32
from tok_core.outputs import EmbeddingOutput
from tok_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tok_core.engine.core import EngineCore

BATCH = 64  # prompts submitted before other tasks of the event loop get a turn


class Embedder:
    """The prompts and options of one call. The constructor raises InvalidField before any request is submitted."""

    def __init__(
        self,
        core: EngineCore,
        prompts: Sequence[str | list[int]],
        pooling: str,
        normalize: bool,
        dimensions: int | None,
        priority: int,
        tenant: str = "",
        cache_salt: str | None = None,
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

        def tell(requests: Sequence[OpenRequest]) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(arrived.put_nowait, requests)

        with self._aborting():
            for index, (ids, tokens) in enumerate(self._prompts):
                self._add(self._core.embed(ids, self._params, self._pooling, tell, tokens, *self._caller))
                if index % BATCH == BATCH - 1:
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
            raise InvalidField(f"prompts[{index}]", error.value, error.allowed) from None

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
        return [one.embedding(normalize=self._normalize, dimensions=self._dimensions) for one in self._requests]
