"""Embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Unpack

from tok_client.mapping import AsyncMap, EmbeddingMapParams, Map
from tok_client.requests import EmbeddingParams, Object, Prompt, Prompts, calls
from tok_client.resources.resource import AsyncResource, Resource, embeddings_of
from tok_client.types import EmbeddingList


class AsyncEmbeddings(AsyncResource):
    """The `/embeddings` endpoints."""

    async def create(
        self,
        *,
        input: Prompts,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[EmbeddingParams],
    ) -> EmbeddingList:
        """Return one embedding vector per input; `Embedding.vector()` decodes it.

        The other parameters are those of the API: see `EmbeddingRequest`. Vectors are sent in base64 unless
        `encoding_format` says otherwise. `timeout` (seconds) replaces the client's; the members of `extra_body` are
        added to the JSON body unchanged.
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
        """Embed all of `inputs`, possibly millions, with many requests open at a time.

        See `AsyncMap` for the results and `MapOptions` for the options. `key` returns an input's key, by which a
        later run continues an output file. The other parameters are those of `create`.
        """
        return self._map(inputs, embeddings_of, key, params, extra_body, timeout)


class Embeddings(Resource):
    """The `/embeddings` endpoints."""

    def create(
        self,
        *,
        input: Prompts,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[EmbeddingParams],
    ) -> EmbeddingList:
        """Return one embedding vector per input; `Embedding.vector()` decodes it.

        The other parameters are those of the API: see `EmbeddingRequest`. Vectors are sent in base64 unless
        `encoding_format` says otherwise. `timeout` (seconds) replaces the client's; the members of `extra_body` are
        added to the JSON body unchanged.
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
        """Embed all of `inputs`, possibly millions, with many requests open at a time.

        See `Map` for the results and `MapOptions` for the options. `key` returns an input's key, by which a
        later run continues an output file. The other parameters are those of `create`.
        """
        return self._map(inputs, embeddings_of, key, params, extra_body, timeout)
