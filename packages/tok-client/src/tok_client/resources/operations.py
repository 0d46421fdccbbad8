"""Endpoints beside OpenAI's API: tokenisation, similarity of texts, health, load, version, metrics, restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from tok_client.requests import RerankParams, ScoreParams, TokenizeParams, calls
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.types import (
    DetokenizeResponse,
    HealthReport,
    LoadReport,
    ReadyReport,
    ReplicaReport,
    RerankResponse,
    ScoreResponse,
    TokenizeResponse,
    VersionReport,
)


class AsyncOperations(AsyncResource):
    """Endpoints beside the API, served below the server's root rather than its `/v1`."""

    async def tokenize(self, *, timeout: float | None = None, **params: Unpack[TokenizeParams]) -> TokenizeResponse:
        """Return the tokens of a `prompt`, or of the `messages` of a chat; see `TokenizeRequest`."""
        return await self._transport.fetch(calls.tokenization(params), timeout)

    async def detokenize(
        self, tokens: Sequence[int], *, model: str | None = None, timeout: float | None = None
    ) -> DetokenizeResponse:
        """Return the text of tokens."""
        return await self._transport.fetch(calls.detokenization(tokens, model), timeout)

    async def score(self, *, timeout: float | None = None, **params: Unpack[ScoreParams]) -> ScoreResponse:
        """Return the cosine similarity of the vectors of `text_1` and `text_2`; see `ScoreRequest`."""
        return await self._transport.fetch(calls.scoring(params), timeout)

    async def rerank(self, *, timeout: float | None = None, **params: Unpack[RerankParams]) -> RerankResponse:
        """Return `documents` in the order of their similarity to `query`; see `RerankRequest`."""
        return await self._transport.fetch(calls.reranking(params), timeout)

    async def health(self, *, timeout: float | None = None) -> HealthReport:
        """Return the server's health. It takes requests if `status` is "ready"."""
        return await self._transport.fetch(calls.HEALTH, timeout)

    async def ready(self, *, timeout: float | None = None) -> ReadyReport:
        """Return whether the server takes requests."""
        return await self._transport.fetch(calls.READY, timeout)

    async def load(self, *, timeout: float | None = None) -> LoadReport:
        """Return the number of prompts whose clients wait."""
        return await self._transport.fetch(calls.LOAD, timeout)

    async def version(self, *, timeout: float | None = None) -> VersionReport:
        """Return the server's version."""
        return await self._transport.fetch(calls.VERSION, timeout)

    async def metrics(self, *, timeout: float | None = None) -> str:
        """Return the server's metrics in Prometheus' text format."""
        return await self._transport.fetch(calls.METRICS, timeout)

    async def restart_replica(self, number: int, *, timeout: float | None = None) -> ReplicaReport:
        """Restart a replica after its open requests; requires the admin key as `api_key`."""
        return await self._transport.fetch(calls.replica_restart(number), timeout)


class Operations(Resource):
    """Endpoints beside the API, served below the server's root rather than its `/v1`."""

    def tokenize(self, *, timeout: float | None = None, **params: Unpack[TokenizeParams]) -> TokenizeResponse:
        """Return the tokens of a `prompt`, or of the `messages` of a chat; see `TokenizeRequest`."""
        return self._transport.fetch(calls.tokenization(params), timeout)

    def detokenize(
        self, tokens: Sequence[int], *, model: str | None = None, timeout: float | None = None
    ) -> DetokenizeResponse:
        """Return the text of tokens."""
        return self._transport.fetch(calls.detokenization(tokens, model), timeout)

    def score(self, *, timeout: float | None = None, **params: Unpack[ScoreParams]) -> ScoreResponse:
        """Return the cosine similarity of the vectors of `text_1` and `text_2`; see `ScoreRequest`."""
        return self._transport.fetch(calls.scoring(params), timeout)

    def rerank(self, *, timeout: float | None = None, **params: Unpack[RerankParams]) -> RerankResponse:
        """Return `documents` in the order of their similarity to `query`; see `RerankRequest`."""
        return self._transport.fetch(calls.reranking(params), timeout)

    def health(self, *, timeout: float | None = None) -> HealthReport:
        """Return the server's health. It takes requests if `status` is "ready"."""
        return self._transport.fetch(calls.HEALTH, timeout)

    def ready(self, *, timeout: float | None = None) -> ReadyReport:
        """Return whether the server takes requests."""
        return self._transport.fetch(calls.READY, timeout)

    def load(self, *, timeout: float | None = None) -> LoadReport:
        """Return the number of prompts whose clients wait."""
        return self._transport.fetch(calls.LOAD, timeout)

    def version(self, *, timeout: float | None = None) -> VersionReport:
        """Return the server's version."""
        return self._transport.fetch(calls.VERSION, timeout)

    def metrics(self, *, timeout: float | None = None) -> str:
        """Return the server's metrics in Prometheus' text format."""
        return self._transport.fetch(calls.METRICS, timeout)

    def restart_replica(self, number: int, *, timeout: float | None = None) -> ReplicaReport:
        """Restart a replica after its open requests; requires the admin key as `api_key`."""
        return self._transport.fetch(calls.replica_restart(number), timeout)
