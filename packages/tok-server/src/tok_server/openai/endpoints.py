"""What may be asked of the model without HTTP: the body of a POST to one of these URLs, answered as a whole."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tok_core import AsyncEngine, EngineDead, RequestOutput, SamplingParams
from tok_server.openai import embeddings
from tok_server.openai.chat import ChatForm
from tok_server.openai.chat import endpoint as chat
from tok_server.openai.completions import CompletionForm
from tok_server.openai.completions import endpoint as completions
from tok_server.openai.embeddings import EmbeddingJob
from tok_server.openai.generation import (
    MAX_KEPT_LOGPROBS,
    MIN_PIECEWISE_BYTES,
    Form,
    Job,
    TokenTexts,
    check_drawn,
    check_grammar,
    check_logprobs,
    check_priority,
    size_of,
    submitted,
)
from tok_server.openai.responses import ResponseForm
from tok_server.openai.responses import endpoint as responses
from tok_server.parsing import output_of
from tok_server.settings import Formats, Limits
from tok_server.wire import invalid

BEHIND = 1 << 40
"""Priority of what nobody waits for: whoever waits is served first."""
APART = 1 << 32  # priorities of its own, above and below


GRAMMARS = 4  # of these that are compiled at once, so that those somebody waits for need not wait


class BackgroundPriority:
    """How many requests the engine has got that nobody waits for."""

    def __init__(self) -> None:
        self.requests = 0

    @contextmanager
    def having(self, requests: int) -> Iterator[None]:
        """So many more meanwhile."""
        self.requests += requests
        try:
            yield
        finally:
            self.requests -= requests


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be asked.

    model           the name under which it is served
    formats         how it writes tool calls and reasoning
    max_n           most samples of a prompt
    share_prefixes  whether tenants share cached prefixes
    least           smallest priority that a body may ask for, among others of its kind; None: any
    checks          taken while a grammar is compiled
    """

    engine: AsyncEngine
    model: str
    formats: Formats
    max_n: int = Limits().max_n
    share_prefixes: bool = False
    least: int | None = None
    unhurried: BackgroundPriority = field(default_factory=BackgroundPriority)
    checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(GRAMMARS))


class EndpointTask(Protocol):
    """A body understood, ready to be computed; once more where that failed."""

    @property
    def samples(self) -> int:
        """How many it takes of those that can run at once."""

    async def compute(self, tenant: str = "") -> Callable[[], bytes]:
        """Waits for the model, on behalf of `tenant`. Returns what writes the answer, to be called in a thread.

        Errors: ApiError, EngineError. Leaving by an exception or cancelled ends what runs.
        """


class GenerationTask:
    """Text generated for a body, behind all requests that somebody waits for. Errors: ApiError."""

    def __init__(self, job: Job, form: Form, served: ServedModel) -> None:
        if job.stream:
            raise invalid("stream", "stream is true; allowed: false (the answer is kept as a whole)")
        check_drawn(job, served.max_n)
        if served.least is not None:
            check_priority(job, served.least)
        most = form.most_logprobs or MAX_KEPT_LOGPROBS
        check_logprobs(job, served.engine.info.max_model_len, most)
        self._job = msgspec.structs.replace(job, params=behind(job.params))
        self._form = form
        self._served = served

    @property
    def samples(self) -> int:
        """All choices."""
        return len(self._job.prompts) * self._job.drawn

    async def compute(self, tenant: str = "") -> Callable[[], bytes]:
        """Waits for all choices."""
        job, engine = self._job, self._served.engine
        if job.params.grammar is not None:
            async with self._served.checks:
                await check_grammar(engine, job, tenant=tenant)
        with self._served.unhurried.having(len(job.prompts)):
            outputs = await self._outputs(tenant)
        if any(choice.finish_reason == "abort" for output in outputs for choice in output.outputs):
            raise EngineDead("the request was aborted: the engine is stopping")
        if size_of(job, outputs) > MIN_PIECEWISE_BYTES:
            return lambda: b"".join(self._form.pieces(outputs))
        return lambda: self._form.whole(outputs)

    async def _outputs(self, tenant: str) -> list[RequestOutput]:
        shared = self._served.share_prefixes
        async with submitted(self._served.engine, self._job, tenant=tenant, share_prefixes=shared) as streams:
            return [await output_of(stream, self._job.stop_when) for stream in streams]


class EmbeddingTask:
    """Embeddings for a body, behind all requests that somebody waits for."""

    def __init__(self, job: EmbeddingJob, served: ServedModel) -> None:
        self._job = dataclasses.replace(job, priority=BEHIND)
        self._served = served

    @property
    def samples(self) -> int:
        """All inputs."""
        return len(self._job.prompts)

    async def compute(self, tenant: str = "") -> Callable[[], bytes]:
        """Waits for all vectors."""
        with self._served.unhurried.having(len(self._job.prompts)):
            shared = self._served.share_prefixes
            outputs = await self._job.embed(self._served.engine, tenant, share_prefixes=shared)
        return lambda: self._job.whole(outputs)


def behind(params: SamplingParams) -> SamplingParams:
    """The same among others of its kind, but after every request that somebody waits for."""
    own = max(-APART, min(params.priority, APART))
    return msgspec.structs.replace(params, priority=BEHIND + own)


def _completion(body: bytes, served: ServedModel) -> EndpointTask:
    job = completions.parse(body, served.engine, served.model)
    return GenerationTask(job, CompletionForm(job, TokenTexts(served.engine.tokenizer)), served)


def _chat(body: bytes, served: ServedModel) -> EndpointTask:
    job = chat.parse(body, served.engine, served.model, served.formats)
    return GenerationTask(job, ChatForm(job, TokenTexts(served.engine.tokenizer)), served)


def _response(body: bytes, served: ServedModel) -> EndpointTask:
    job, begun = responses.parse(body, served.engine, served.model, served.formats)
    return GenerationTask(job, ResponseForm(job, begun, TokenTexts(served.engine.tokenizer)), served)


def _embeddings(body: bytes, served: ServedModel) -> EndpointTask:
    return EmbeddingTask(embeddings.parse(body, served.engine, served.model), served)


Prepare = Callable[[bytes, ServedModel], EndpointTask]

ENDPOINTS: Mapping[str, Prepare] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embeddings,
}
"""URL -> what understands a body sent there. Slow: for threads. Errors: ApiError."""
