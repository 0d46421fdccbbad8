"""Serve /v1/embeddings: embedding vectors of texts."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tok_client.types import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from tok_core import AsyncEngine, EmbeddingOutput, InvalidField, Pooling
from tok_server.http import CONTEXT, read_body, tenant_cache_salt
from tok_server.observability import COUNTS
from tok_server.openai.generation import (
    cache_salt_of,
    check_model,
    has_few_token_ids,
    ignored_header,
    parse_request,
    prompt_field_name,
    request_deadline,
    tokenise_prompts,
    value_or_none,
    write_pieces,
)
from tok_server.wire import (
    ApiError,
    encode,
    encode_elements,
    fill_lists,
    invalid,
    invalid_field,
    json_post,
)

if TYPE_CHECKING:
    import numpy as np

MAX_INPUTS = 2048  # inputs of a request; OpenAI's limit
MAX_LOOP_COMPONENTS = 4096  # vector components up to which the event loop encodes an answer; beyond, a thread does
MIN_PIECEWISE_COMPONENTS = 65_536  # vector components beyond which an answer is written in pieces
_PROMPT = re.compile(r"prompts\[(?P<index>\d+)\]")


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """One parsed HTTP request.

    prompts    token ids of each input
    fields     names of the fields that hold the inputs, in order, each with its number of inputs
    normalize  whether vectors have length 1
    ignored    paths of unknown fields
    """

    model: str
    prompts: list[list[int]]
    fields: tuple[tuple[str, int], ...]
    pooling: Pooling
    dimensions: int | None = None
    base64: bool = False
    normalize: bool = True
    ignored: tuple[str, ...] = ()
    priority: int = 0
    cache_salt: str | None = None

    async def embed(self, engine: AsyncEngine, tenant: str, *, share_prefixes: bool) -> list[EmbeddingOutput]:
        """Compute the embeddings for `tenant`, one output per input. Errors: ApiError, EngineError."""
        salt = tenant_cache_salt(tenant, self.cache_salt, share_prefixes=share_prefixes)
        options = {"dimensions": self.dimensions, "priority": self.priority, "cache_salt": salt}
        options["normalize"] = self.normalize
        try:
            return await engine.embed(self.prompts, pooling=self.pooling, tenant=tenant, **options)  # type: ignore[arg-type]
        except InvalidField as error:
            raise self._field_error(error) from error

    def encode_answer(self, outputs: list[EmbeddingOutput]) -> bytes:
        """Encode the answer. Call this in a thread unless the answer is short."""
        return b"".join(self.encode_pieces(outputs))

    def encode_pieces(self, outputs: list[EmbeddingOutput]) -> Iterator[bytes]:
        """Yield the encoded answer, one vector at a time."""
        vectors = (
            [Embedding(index=index, embedding=self.encode_vector(one.embedding))] for index, one in enumerate(outputs)
        )
        yield from fill_lists(
            encode(EmbeddingList(data=[], model=self.model, usage=self.usage)), [("data", encode_elements(vectors))]
        )

    @property
    def usage(self) -> EmbeddingUsage:
        """Return the tokens of all inputs."""
        tokens = sum(map(len, self.prompts))
        return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)

    def encode_vector(self, vector: np.ndarray) -> list[float] | str:
        """Return the vector as the request asks for it: a list of numbers, or base64."""
        if not self.base64:
            numbers: list[float] = vector.tolist()
            return numbers
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()

    def _field_error(self, error: InvalidField) -> ApiError:
        match = _PROMPT.fullmatch(error.field)
        return invalid_field(error, error.field if match is None else self._input_name(int(match["index"])))

    def _input_name(self, index: int) -> str:
        for field, count in self.fields:
            if index < count:
                return prompt_field_name(field, index, count)
            index -= count
        raise AssertionError("the engine names one of the inputs")


ParseEmbedding = Callable[[bytes, AsyncEngine, tuple[str, ...]], EmbeddingJob]
"""Parser of an endpoint's bytes, given the engine and the model's names. Slow for long inputs. Errors: ApiError."""


async def create(request: web.Request) -> web.StreamResponse:
    """Return embedding vectors of texts."""
    return await answer_embedding(request, parse)


async def answer_embedding(request: web.Request, parse: ParseEmbedding) -> web.StreamResponse:
    """Answer a POST request whose job embeds its inputs."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    parse_body = partial(parse, body, context.engine, context.settings.model_names)
    job = parse_body() if has_few_token_ids("input", body) else await context.run_in_thread(parse_body)
    context.admit(request[COUNTS].tenant)  # while this request was parsed, others may have been submitted
    counts = request[COUNTS]
    async with request_deadline(request, context):
        with context.track_prompts(counts.tenant, len(job.prompts)):
            outputs = await job.embed(context.engine, counts.tenant, share_prefixes=context.settings.share_prefixes)
    counts.prompt_tokens += sum(map(len, job.prompts))
    counts.cached_tokens += sum(one.cached_tokens for one in outputs)
    numbers = sum(len(one.embedding) for one in outputs)
    headers = ignored_header(context, job.ignored)
    if numbers > MIN_PIECEWISE_COMPONENTS:
        return await write_pieces(request, context, job.encode_pieces(outputs), headers)
    encode_answer = partial(job.encode_answer, outputs)
    answer = encode_answer() if numbers <= MAX_LOOP_COMPONENTS else await context.run_in_thread(encode_answer)
    return web.Response(body=answer, content_type="application/json", headers=headers)


def parse(body: bytes, engine: AsyncEngine, names: tuple[str, ...]) -> EmbeddingJob:
    """Parse the body into a job with inputs as token ids. Slow for long inputs. Errors: ApiError."""
    request, ignored = parse_request(body, EmbeddingRequest, ())
    return EmbeddingJob(**job_fields(request, engine, names), ignored=ignored)


def job_fields(request: EmbeddingRequest, engine: AsyncEngine, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what a job takes from a request for vectors: model, token ids and form. Errors: ApiError."""
    model = check_model(value_or_none(request.model), names)
    inputs = request.inputs()
    check_count("input", len(inputs))
    return {
        "model": model,
        "prompts": tokenise_prompts(inputs, engine, "input"),
        "fields": (("input", len(inputs)),),
        "pooling": value_or_none(request.pooling) or "last",
        "dimensions": value_or_none(request.dimensions),
        "base64": value_or_none(request.encoding_format) == "base64",
        "cache_salt": cache_salt_of(request),
    }


def check_count(field: str, count: int) -> None:
    """Raise ApiError (400) for more than `MAX_INPUTS` inputs."""
    if count > MAX_INPUTS:
        raise invalid(field, f"{field} holds {count} inputs; allowed: at most {MAX_INPUTS}")


OPERATIONS = (json_post("/v1/embeddings", create, EmbeddingRequest, EmbeddingList, errors=(404,)),)
