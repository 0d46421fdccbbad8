"""The models that a server has."""

from __future__ import annotations

from tok_client.requests import calls
from tok_client.transport import BlockingTransport, Transport
from tok_client.types import Model, ModelList


class AsyncModels:
    """`/models`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, timeout: float | None = None) -> ModelList:
        """The models that the server has."""
        return await self._transport.fetch(calls.models(), timeout)

    async def retrieve(self, model: str, *, timeout: float | None = None) -> Model:
        """The model with the id `model`. NotFoundError: there is none."""
        return await self._transport.fetch(calls.model(model), timeout)


class Models:
    """`/models`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def list(self, *, timeout: float | None = None) -> ModelList:
        """The models that the server has."""
        return self._transport.fetch(calls.models(), timeout)

    def retrieve(self, model: str, *, timeout: float | None = None) -> Model:
        """The model with the id `model`. NotFoundError: there is none."""
        return self._transport.fetch(calls.model(model), timeout)
