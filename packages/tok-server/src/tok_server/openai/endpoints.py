"""Compute whole answers to POST bodies without HTTP, at background priority (for lines of batches)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tok_core import AsyncEngine, EngineDead, RequestOutput, SamplingParams
from tok_server.openai import embeddings, scores
from tok_server.openai.chat import endpoint as chat
from tok_server.openai.completions import endpoint as completions
from tok_server.openai.embeddings import EmbeddingJob, ParseEmbedding
from tok_server.openai.generation import (
    MAX_KEPT_LOGPROBS,
    MIN_PIECEWISE_BYTES,
    AnswerSerializer,
    GenerationJob,
    Parse,
    SubmittedStreams,
    check_grammar,
    check_limits,
    estimate_bytes,
    wait_for_output,
)
from tok_server.openai.responses import endpoint as responses
from tok_server.settings import Formats, Limits
from tok_server.wire import invalid

BACKGROUND_PRIORITY = 1 << 40
"""Base priority of background requests: the engine serves every interactive request before them."""
MAX_RELATIVE_PRIORITY = 1 << 32  # background priorities are this far from BACKGROUND_PRIORITY at most


MAX_BACKGROUND_GRAMMARS = (
    4  # grammars of background requests compiled at once; the limit keeps interactive ones from waiting
)


class BackgroundPriority:
    """Counter of the background requests that are open in the engine."""

    def __init__(self) -> None:
        self.requests = 0

    @contextmanager
    def track_prompts(self, requests: int) -> Iterator[None]:
        """Count `requests` more inside the `with` block."""
        self.requests += requests
        try:
            yield
        finally:
            self.requests -= requests


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, and how background requests to it are read and limited.

    names                its names; answers show the first
    formats              how it writes tool calls and reasoning
    max_n                largest number of samples per prompt
    share_prefixes       whether tenants share cached prefixes
    min_priority         smallest priority that a body may ask for, relative to other background requests; None: any
    background_requests  counts the background requests that are open in the engine
    grammar_checks       held while a grammar is compiled
    """

    engine: AsyncEngine
    names: tuple[str, ...]
    formats: Formats
    max_n: int = Limits().max_n
    share_prefixes: bool = False
    min_priority: int | None = None
    background_requests: BackgroundPriority = field(default_factory=BackgroundPriority)
    grammar_checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_BACKGROUND_GRAMMARS))


class EndpointTask(Protocol):
    """A parsed body, ready to be computed. `compute` may be called again after a failure."""

    @property
    def samples(self) -> int:
        """Return the number of samples it runs, which counts against the samples that can run at once."""

    async def compute(self, tenant: str = "") -> Callable[[], bytes]:
        """Compute the answer on behalf of `tenant`. Return a function that encodes it, to be called in a thread.

        Errors: ApiError, EngineError. An exception or a cancellation aborts the engine requests.
        """


class GenerationTask:
    """Text generation for one body, at background priority. Errors: ApiError."""

    def __init__(self, job: GenerationJob, serializer: AnswerSerializer, served: ServedModel) -> None:
        if job.stream:
            raise invalid("stream", "stream is true; allowed in a batch: false")
        max_logprobs = serializer.max_logprobs or MAX_KEPT_LOGPROBS
        check_limits(job, served.max_n, served.min_priority, served.engine.info.max_model_len, max_logprobs)
        self._job = msgspec.structs.replace(job, params=background_params(job.params))
        self._serializer = serializer
        self._served = served

    @property
    def samples(self) -> int:
        """Return the number of samples of all prompts."""
        return len(self._job.prompts) * self._job.samples_per_prompt

    async def compute(self, tenant: str = "") -> Callable[[], bytes]:
        """Generate all choices; return a function that encodes the answer."""
        job, engine = self._job, self._served.engine
        if job.params.grammar is not None:
            async with self._served.grammar_checks:
                await check_grammar(engine, job, tenant=tenant)
        with self._served.background_requests.track_prompts(len(job.prompts)):
            outputs = await self._outputs(tenant)
        if any(choice.finish_reason == "abort" for output in outputs for choice in output.outputs):
            raise EngineDead("the request was aborted: the engine is stopping")
        if estimate_bytes(job, outputs) > MIN_PIECEWISE_BYTES:
            return lambda: b"".join(self._serializer.encode_pieces(outputs))
        return lambda: self._serializer.encode_answer(outputs)

    async def _outputs(self, tenant: str) -> list[RequestOutput]:
        share_prefixes = self._served.share_prefixes
        async with SubmittedStreams(
            self._served.engine, self._job, tenant=tenant, share_prefixes=share_prefixes
        ) as streams:
            return [await wait_for_output(stream, self._job.stop_when) for stream in streams]


class EmbeddingTask:
    """Embeddings, or scores by them, for one body, at background priority."""

    def __init__(self, job: EmbeddingJob, served: ServedModel) -> None:
        self._job = dataclasses.replace(job, priority=BACKGROUND_PRIORITY)
        self._served = served

    @property
    def samples(self) -> int:
        """Return the number of inputs."""
        return len(self._job.prompts)

    async def compute(self, tenant: str = "") -> Callable[[], bytes]:
        """Compute all vectors; return a function that encodes the answer."""
        with self._served.background_requests.track_prompts(len(self._job.prompts)):
            share_prefixes = self._served.share_prefixes
            outputs = await self._job.embed(self._served.engine, tenant, share_prefixes=share_prefixes)
        return lambda: self._job.encode_answer(outputs)


def background_params(params: SamplingParams) -> SamplingParams:
    """Move the priority behind all interactive requests, and keep the order among background requests."""
    relative = max(-MAX_RELATIVE_PRIORITY, min(params.priority, MAX_RELATIVE_PRIORITY))
    return msgspec.structs.replace(params, priority=BACKGROUND_PRIORITY + relative)


Prepare = Callable[[bytes, ServedModel], EndpointTask]


def _generation(parse: Parse) -> Prepare:
    def prepare(body: bytes, served: ServedModel) -> EndpointTask:
        return GenerationTask(*parse(body, served.engine, served.names, served.formats), served)

    return prepare


def _embedding(parse: ParseEmbedding) -> Prepare:
    return lambda body, served: EmbeddingTask(parse(body, served.engine, served.names), served)


ENDPOINTS: Mapping[str, Prepare] = {
    "/v1/chat/completions": _generation(chat.parse),
    "/v1/completions": _generation(completions.parse),
    "/v1/responses": _generation(responses.parse),
    "/v1/embeddings": _embedding(embeddings.parse),
    "/v1/score": _embedding(scores.parse_score),
    "/score": _embedding(scores.parse_score),
}
"""URL -> function that parses a body sent there. Slow: call it in a thread. Errors: ApiError."""
