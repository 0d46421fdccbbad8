"""The models that a server serves."""

from __future__ import annotations

from tok_client.requests import calls
from tok_client.transport import BlockingTransport, Transport
from tok_client.types import Model, ModelList


class AsyncModels:
    """The `/models` endpoints."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, timeout: float | None = None) -> ModelList:
        """Return the models that the server serves."""
        return await self._transport.fetch(calls.models(), timeout)

    async def retrieve(self, model: str, *, timeout: float | None = None) -> Model:
        """Return the model with the id `model`. NotFoundError: the model does not exist."""
        return await self._transport.fetch(calls.model(model), timeout)


class Models:
    """The `/models` endpoints."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def list(self, *, timeout: float | None = None) -> ModelList:
        """Return the models that the server serves."""
        return self._transport.fetch(calls.models(), timeout)

    def retrieve(self, model: str, *, timeout: float | None = None) -> Model:
        """Return the model with the id `model`. NotFoundError: the model does not exist."""
        return self._transport.fetch(calls.model(model), timeout)
