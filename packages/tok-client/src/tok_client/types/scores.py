"""Pooled vectors, and the similarity of texts by their vectors, in the shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Literal

from tok_client.types.base import UNSET, Maybe, Wire
from tok_client.types.embeddings import EmbeddingRequest, EmbeddingUsage

Texts = str | list[str]


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True):
    """Body of `POST /pooling`: the fields of `EmbeddingRequest`, and some of vLLM's.

    task            "embed": one vector per input
    use_activation  whether vectors have length 1; absent: true
    """

    task: Maybe[Literal["embed"]] = UNSET
    use_activation: Maybe[bool] = UNSET


class PooledVector(Wire, frozen=True, kw_only=True):
    """The vector of input number `index`: a list of numbers, or little-endian 32-bit floats in base64."""

    object: str = "pooling"
    index: int
    data: list[float] | str


class PoolingResponse(Wire, frozen=True, kw_only=True):
    """Response of `POST /pooling`; `data` in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledVector]
    usage: EmbeddingUsage


class _TextPairs(Wire, frozen=True, kw_only=True):
    """Fields that `ScoreRequest` and `RerankRequest` share with `EmbeddingRequest`."""

    model: Maybe[str] = UNSET
    user: Maybe[str] = UNSET
    pooling: Maybe[Literal["last", "mean"]] = UNSET
    cache_salt: Maybe[str] = UNSET


class ScoreRequest(_TextPairs, frozen=True, kw_only=True):
    """Body of `POST /score`: pairs of texts, whose cosine similarity is the score.

    text_1  a text, which is paired with each text of `text_2`, or a list of texts
    text_2  a text, or as many texts as `text_1` has; any number if that is one text

    ValueError (when decoding: msgspec.ValidationError): the numbers of texts do not match, or there is none.
    """

    text_1: Texts
    text_2: Texts

    def __post_init__(self) -> None:
        first, second = self.texts()
        for name, texts in (("text_1", first), ("text_2", second)):
            if not isinstance(texts, list | tuple):
                raise ValueError(f"{name} is of the type {type(texts).__name__}; allowed: a text, or a list of texts")
        if not first or not second:
            raise ValueError(f"{'text_2' if first else 'text_1'} is []; allowed: at least one text")
        if len(first) not in (1, len(second)):
            allowed = f"one text, or as many as text_2 ({len(second)})"
            raise ValueError(f"text_1 has {len(first)} texts; allowed: {allowed}")

    def texts(self) -> tuple[list[str], list[str]]:
        """Return `text_1` and `text_2` as lists."""
        first, second = self.text_1, self.text_2
        return [first] if isinstance(first, str) else first, [second] if isinstance(second, str) else second


class Score(Wire, frozen=True, kw_only=True):
    """The score of pair number `index`."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(Wire, frozen=True, kw_only=True):
    """Response of `POST /score`; `data` in the order of the pairs. `usage` counts each text once."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RerankRequest(_TextPairs, frozen=True, kw_only=True):
    """Body of `POST /rerank`: documents to order by the cosine similarity of their vectors to the query's.

    top_n             number of results, the most similar ones; absent or 0: all
    return_documents  whether results have the document's text; absent: true

    ValueError (when decoding: msgspec.ValidationError): there is no document, or `top_n` is negative.
    """

    query: str
    documents: list[str]
    top_n: Maybe[int] = UNSET
    return_documents: Maybe[bool] = UNSET

    def __post_init__(self) -> None:
        if not self.documents:
            raise ValueError("documents is []; allowed: at least one text")
        if isinstance(self.top_n, int) and self.top_n < 0:
            raise ValueError(f"top_n is {self.top_n}; allowed: integers from 0 (all documents)")


class RerankDocument(Wire, frozen=True, kw_only=True):
    """A document of a `RerankRequest`."""

    text: str


class RerankResult(Wire, frozen=True, kw_only=True):
    """The similarity of document number `index`."""

    index: int
    document: Maybe[RerankDocument] = UNSET
    relevance_score: float


class RerankUsage(Wire, frozen=True, kw_only=True):
    """Tokens of the query and all documents."""

    total_tokens: int


class RerankResponse(Wire, frozen=True, kw_only=True):
    """Response of `POST /rerank`; `results` begin with the most similar document."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
