"""Embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Unpack, cast

from tok_client import calls
from tok_client.blocking import BlockingTransport
from tok_client.bodies import Object
from tok_client.mapping.inputs import embeddings_of
from tok_client.mapping.iterate import AsyncMap, Map
from tok_client.mapping.options import EmbeddingMapParams, MapOptions
from tok_client.mapping.run import MapRun
from tok_client.params import EmbeddingParams, Prompt, Prompts
from tok_client.transport import Transport
from tok_client.types import EmbeddingList


class AsyncEmbeddings:
    """`/embeddings`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

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
        options, rest = MapOptions.split(cast(Object, params))
        make = embeddings_of(rest, extra_body)
        return AsyncMap(MapRun(self._transport, inputs, make, key, options, timeout))


class Embeddings:
    """`/embeddings`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

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
        options, rest = MapOptions.split(cast(Object, params))
        make = embeddings_of(rest, extra_body)
        return Map(MapRun(self._transport.transport, inputs, make, key, options, timeout), self._transport.thread)
