"""Serve /pooling, /score and /rerank: vectors of texts in vLLM's shapes, and the cosine similarity of texts by them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web

from tok_client.types import (
    UNSET,
    PooledVector,
    PoolingRequest,
    PoolingResponse,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from tok_core import AsyncEngine, EmbeddingOutput
from tok_server.openai.embeddings import EmbeddingJob, answer_embedding, check_count, job_fields
from tok_server.openai.generation import (
    UnsupportedFields,
    cache_salt_of,
    check_model,
    parse_request,
    tokenise_prompts,
    value_or_none,
)
from tok_server.wire import encode, encode_elements, fill_lists, json_post, new_id

_ACTIVATION = (None, True, False)  # the activations of vLLM's embedding models do not change a cosine
_NOT_SUPPORTED = "is not supported: texts are never cut"
POOLING = (
    UnsupportedFields({"truncate_prompt_tokens": (None,)}, _NOT_SUPPORTED),
    UnsupportedFields({"messages": (None,), "data": (None,)}, "is not supported: /pooling takes input"),
    UnsupportedFields({"normalize": (None, True)}, "is not supported; use use_activation for vectors of length 1"),
    UnsupportedFields({"add_special_tokens": (None, True), "priority": (None, 0)}, "is not supported yet"),
)
PAIRS = (
    UnsupportedFields(
        {"truncate_prompt_tokens": (None,), "max_tokens_per_doc": (None,), "max_chunks_per_doc": (None,)},
        _NOT_SUPPORTED,
    ),
    UnsupportedFields(
        {"priority": (None, 0), "use_activation": _ACTIVATION, "activation": _ACTIVATION, "softmax": _ACTIVATION},
        "is not supported yet",
    ),
)


@dataclass(frozen=True, slots=True)
class PoolingJob(EmbeddingJob):
    """A request for vectors."""

    def encode_pieces(self, outputs: list[EmbeddingOutput]) -> Iterator[bytes]:
        """Yield the encoded answer, one vector at a time."""
        head = PoolingResponse(id=new_id("pool"), created=int(time.time()), model=self.model, data=[], usage=self.usage)
        vectors = (
            [PooledVector(index=index, data=self.encode_vector(one.embedding))] for index, one in enumerate(outputs)
        )
        yield from fill_lists(encode(head), [("data", encode_elements(vectors))])


@dataclass(frozen=True, slots=True)
class ScoreJob(EmbeddingJob):
    """A request for the similarity of pairs of texts."""

    def encode_pieces(self, outputs: list[EmbeddingOutput]) -> Iterator[bytes]:
        """Yield the encoded answer in one piece."""
        scores = self.similarities(outputs)
        data = [Score(index=index, score=score) for index, score in enumerate(scores.tolist())]
        yield encode(
            ScoreResponse(id=new_id("score"), created=int(time.time()), model=self.model, data=data, usage=self.usage)
        )

    def similarities(self, outputs: list[EmbeddingOutput]) -> np.ndarray:
        """Return the cosine similarity of each pair; a single first text is paired with all others."""
        vectors_TD = np.stack([one.embedding for one in outputs])  # T texts, D dimensions; all of length 1
        _, count = self.fields[0]
        found: np.ndarray = np.einsum("td,td->t", *np.broadcast_arrays(vectors_TD[:count], vectors_TD[count:]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankJob(ScoreJob):
    """A request to order documents by their similarity to a query.

    documents  their texts; None: the answer does not repeat them
    top_n      number of results
    """

    documents: list[str] | None
    top_n: int

    def encode_pieces(self, outputs: list[EmbeddingOutput]) -> Iterator[bytes]:
        """Yield the encoded answer in one piece."""
        scores = self.similarities(outputs)
        results = [
            RerankResult(
                index=index,
                document=UNSET if self.documents is None else RerankDocument(text=self.documents[index]),
                relevance_score=float(scores[index]),
            )
            for index in np.argsort(-scores, kind="stable")[: self.top_n].tolist()
        ]
        usage = RerankUsage(total_tokens=self.usage.total_tokens)
        yield encode(RerankResponse(id=new_id("rerank"), model=self.model, usage=usage, results=results))


async def pool(request: web.Request) -> web.StreamResponse:
    """Return vectors of texts, in vLLM's shape."""
    return await answer_embedding(request, parse_pooling)


async def score(request: web.Request) -> web.StreamResponse:
    """Return the cosine similarity of pairs of texts by their embedding vectors."""
    return await answer_embedding(request, parse_score)


async def rerank(request: web.Request) -> web.StreamResponse:
    """Return documents in the order of the cosine similarity of their embedding vectors to the query's."""
    return await answer_embedding(request, parse_rerank)


def parse_pooling(body: bytes, engine: AsyncEngine, names: tuple[str, ...]) -> PoolingJob:
    """Parse the body of a `PoolingRequest`. Slow for long inputs. Errors: ApiError."""
    request, ignored = parse_request(body, PoolingRequest, POOLING)
    normalize = value_or_none(request.use_activation) is not False
    return PoolingJob(**job_fields(request, engine, names), normalize=normalize, ignored=ignored)


def parse_score(body: bytes, engine: AsyncEngine, names: tuple[str, ...]) -> ScoreJob:
    """Parse the body of a `ScoreRequest`. Slow for long texts. Errors: ApiError."""
    request, ignored = parse_request(body, ScoreRequest, PAIRS)
    first, second = request.texts()
    texts = {"text_1": first, "text_2": second}
    return ScoreJob(**_pair_fields(request, texts, engine, names), ignored=ignored)


def parse_rerank(body: bytes, engine: AsyncEngine, names: tuple[str, ...]) -> RerankJob:
    """Parse the body of a `RerankRequest`. Slow for long texts. Errors: ApiError."""
    request, ignored = parse_request(body, RerankRequest, PAIRS)
    return RerankJob(
        **_pair_fields(request, {"query": [request.query], "documents": request.documents}, engine, names),
        ignored=ignored,
        documents=None if value_or_none(request.return_documents) is False else request.documents,
        top_n=value_or_none(request.top_n) or len(request.documents),
    )


def _pair_fields(
    request: ScoreRequest | RerankRequest, texts: Mapping[str, list[str]], engine: AsyncEngine, names: tuple[str, ...]
) -> dict[str, Any]:
    """Return the fields of a `ScoreJob` for the `texts` of two fields of the request. Errors: ApiError."""
    model = check_model(value_or_none(request.model), names)
    for field, values in texts.items():
        check_count(field, len(values))
    return {
        "model": model,
        "prompts": [ids for field, values in texts.items() for ids in tokenise_prompts([*values], engine, field)],
        "fields": tuple((field, len(values)) for field, values in texts.items()),
        "pooling": value_or_none(request.pooling) or "last",
        "cache_salt": cache_salt_of(request),
    }


OPERATIONS = (
    json_post("/pooling", pool, PoolingRequest, PoolingResponse, errors=(404,)),
    *(json_post(url, score, ScoreRequest, ScoreResponse, errors=(404,)) for url in ("/score", "/v1/score")),
    *(
        json_post(url, rerank, RerankRequest, RerankResponse, errors=(404,))
        for url in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
)
