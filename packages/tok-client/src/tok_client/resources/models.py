"""The models that a server serves."""

from __future__ import annotations

from tok_client.requests import calls
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.types import Model, ModelList


class AsyncModels(AsyncResource):
    """The `/models` endpoints."""

    async def list(self, *, timeout: float | None = None) -> ModelList:
        """Return the models that the server serves."""
        return await self._transport.fetch(calls.MODELS, timeout)

    async def retrieve(self, model: str, *, timeout: float | None = None) -> Model:
        """Return the model with the id `model`. NotFoundError: the model does not exist."""
        return await self._transport.fetch(calls.model(model), timeout)


class Models(Resource):
    """The `/models` endpoints."""

    def list(self, *, timeout: float | None = None) -> ModelList:
        """Return the models that the server serves."""
        return self._transport.fetch(calls.MODELS, timeout)

    def retrieve(self, model: str, *, timeout: float | None = None) -> Model:
        """Return the model with the id `model`. NotFoundError: the model does not exist."""
        return self._transport.fetch(calls.model(model), timeout)
