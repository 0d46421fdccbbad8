"""Serve /v1/embeddings: embedding vectors of texts."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from tok_client.types import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from tok_core import AsyncEngine, EmbeddingOutput, InvalidField, Pooling
from tok_server.http import CONTEXT, read_body, salted
from tok_server.observability import COUNTS
from tok_server.openai.completions import MAX_LOOP_PROMPT_BYTES, numbered, tokenised
from tok_server.openai.generation import (
    cache_salt_of,
    check_model,
    given,
    ignored_header,
    in_time,
    read,
    renamed,
    write_pieces,
)
from tok_server.wire import ApiError, Operation, elements, encode, filled, invalid, json_of

if TYPE_CHECKING:
    import numpy as np

MAX_INPUTS = 2048  # inputs of a request; OpenAI's limit
MAX_LOOP_COMPONENTS = 4096  # vector components up to which the event loop encodes an answer; beyond, a thread does
MIN_PIECEWISE_COMPONENTS = 65_536  # vector components beyond which an answer is written in pieces
_TOKEN_IDS = re.compile(rb'"input"\s*:\s*\[[\s\[]*\d')
_PROMPT = re.compile(r"prompts\[(?P<index>\d+)\]")


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """One parsed HTTP request. `prompts`: token ids of each input; `ignored`: paths of unknown fields."""

    model: str
    prompts: list[list[int]]
    pooling: Pooling
    dimensions: int | None
    base64: bool
    ignored: tuple[str, ...] = ()
    priority: int = 0
    cache_salt: str | None = None

    async def embed(self, engine: AsyncEngine, tenant: str, *, share_prefixes: bool) -> list[EmbeddingOutput]:
        """Compute the embeddings for `tenant`, one output per input. Errors: ApiError, EngineError."""
        salt = salted(tenant, self.cache_salt, share_prefixes=share_prefixes)
        options = {"dimensions": self.dimensions, "priority": self.priority, "cache_salt": salt}
        try:
            return await engine.embed(self.prompts, pooling=self.pooling, tenant=tenant, **options)  # type: ignore[arg-type]
        except InvalidField as error:
            raise self._refused(error) from error

    def whole(self, outputs: list[EmbeddingOutput]) -> bytes:
        """Encode the answer. Call this in a thread unless the answer is short."""
        return b"".join(self.pieces(outputs))

    def pieces(self, outputs: list[EmbeddingOutput]) -> Iterator[bytes]:
        """Yield the encoded answer, one vector at a time."""
        tokens = sum(map(len, self.prompts))
        used = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        vectors = (
            [Embedding(index=index, embedding=_written(one.embedding, as_base64=self.base64))]
            for index, one in enumerate(outputs)
        )
        yield from filled(encode(EmbeddingList(data=[], model=self.model, usage=used)), [("data", elements(vectors))])

    def _refused(self, error: InvalidField) -> ApiError:
        found = _PROMPT.fullmatch(error.field)
        name = error.field if found is None else numbered("input", int(found["index"]), len(self.prompts))
        return renamed(error, name)


async def create(request: web.Request) -> web.StreamResponse:
    """Embedding vectors of texts."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    short = len(body) <= MAX_LOOP_PROMPT_BYTES and _TOKEN_IDS.search(body) is not None
    engine, model = context.engine, context.settings.model_name
    job = parse(body, engine, model) if short else await context.work(lambda: parse(body, engine, model))
    context.admit(request[COUNTS].tenant)  # while this request was parsed, others may have been submitted
    counts = request[COUNTS]
    with in_time(request, context), context.having(counts.tenant, len(job.prompts)):
        outputs = await job.embed(context.engine, counts.tenant, share_prefixes=context.settings.share_prefixes)
    counts.prompt_tokens += sum(map(len, job.prompts))
    counts.cached_tokens += sum(one.cached_tokens for one in outputs)
    numbers = sum(len(one.embedding) for one in outputs)
    headers = ignored_header(context, job.ignored)
    if numbers > MIN_PIECEWISE_COMPONENTS:
        return await write_pieces(request, context, job.pieces(outputs), headers)
    answer = job.whole(outputs) if numbers <= MAX_LOOP_COMPONENTS else await context.work(lambda: job.whole(outputs))
    return web.Response(body=answer, content_type="application/json", headers=headers)


def parse(body: bytes, engine: AsyncEngine, model: str) -> EmbeddingJob:
    """Parse the body into a job with inputs as token ids. Slow for long inputs. Errors: ApiError."""
    request, ignored = read(body, EmbeddingRequest, ())
    check_model(given(request.model), model)
    inputs = request.inputs()
    if len(inputs) > MAX_INPUTS:
        raise invalid("input", f"input holds {len(inputs)} inputs; allowed: at most {MAX_INPUTS}")
    return EmbeddingJob(
        model=model,
        prompts=tokenised(inputs, engine, "input"),
        pooling=given(request.pooling) or "last",
        dimensions=given(request.dimensions),
        base64=given(request.encoding_format) == "base64",
        ignored=ignored,
        cache_salt=cache_salt_of(request),
    )


def _written(vector: np.ndarray, *, as_base64: bool) -> list[float] | str:
    if not as_base64:
        numbers: list[float] = vector.tolist()
        return numbers
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


OPERATIONS = (
    Operation(
        "POST",
        "/v1/embeddings",
        create,
        request=json_of(EmbeddingRequest),
        answers={200: json_of(EmbeddingList)},
        errors=(404,),
    ),
)
