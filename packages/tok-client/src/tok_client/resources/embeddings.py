"""Embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Unpack

from tok_client.mapping import AsyncMap, EmbeddingMapParams, Map, embeddings_of
from tok_client.requests import EmbeddingParams, Object, Prompt, Prompts, calls
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.types import EmbeddingList


class AsyncEmbeddings(AsyncResource):
    """`/embeddings`."""

    async def create(
        self,
        *,
        input: Prompts,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[EmbeddingParams],
    ) -> EmbeddingList:
        """Vectors that stand for the inputs; `Embedding.vector()` gives one's numbers.

        The other parameters are those of the wire: see `EmbeddingRequest`. Vectors travel in base64 unless
        `encoding_format` says otherwise. `timeout` (seconds) takes the place of the client's; `extra_body` is added to
        the JSON body as it is.
        """
        return await self._transport.fetch(calls.embedding(input, params, extra_body), timeout)

    def map(
        self,
        inputs: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        key: Callable[[Prompt], str] | None = None,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[EmbeddingMapParams],
    ) -> AsyncMap[Prompt, EmbeddingList]:
        """Answers all of `inputs`, of which there may be millions, many at a time.

        See `AsyncMap` for the results, `MapOptions` for how it goes about it; `key` makes a key for each, by which an
        output is gone on with. The other parameters are those of `create`.
        """
        return self._map(inputs, embeddings_of, key, params, extra_body, timeout)


class Embeddings(Resource):
    """`/embeddings`."""

    def create(
        self,
        *,
        input: Prompts,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[EmbeddingParams],
    ) -> EmbeddingList:
        """Vectors that stand for the inputs; `Embedding.vector()` gives one's numbers.

        The other parameters are those of the wire: see `EmbeddingRequest`. Vectors travel in base64 unless
        `encoding_format` says otherwise. `timeout` (seconds) takes the place of the client's; `extra_body` is added to
        the JSON body as it is.
        """
        return self._transport.fetch(calls.embedding(input, params, extra_body), timeout)

    def map(
        self,
        inputs: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        key: Callable[[Prompt], str] | None = None,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[EmbeddingMapParams],
    ) -> Map[Prompt, EmbeddingList]:
        """Answers all of `inputs`, of which there may be millions, many at a time.

        See `Map` for the results, `MapOptions` for how it goes about it; `key` makes a key for each, by which an
        output is gone on with. The other parameters are those of `create`.
        """
        return self._map(inputs, embeddings_of, key, params, extra_body, timeout)
