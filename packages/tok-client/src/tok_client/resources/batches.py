"""Batches: files of requests that a server answers when it has capacity."""

from __future__ import annotations

import asyncio
import time
from typing import Unpack

from tok_client.requests import BatchParams, Object, calls
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.types import Batch, BatchList

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class AsyncBatches(AsyncResource):
    """The `/batches` endpoints."""

    async def create(
        self, *, timeout: float | None = None, extra_body: Object | None = None, **params: Unpack[BatchParams]
    ) -> Batch:
        """Start a batch from an uploaded file; see `BatchRequest`.

        A broken connection is not retried, because the batch may have started.
        """
        return await self._transport.fetch(calls.batch_creation(params, extra_body), timeout)

    async def list(
        self, *, after: str | None = None, limit: int | None = None, timeout: float | None = None
    ) -> BatchList:
        """Return all batches, the newest first; `after` is the last id of the previous page."""
        return await self._transport.fetch(calls.batch_list(after, limit), timeout)

    async def retrieve(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Return one batch and its progress. NotFoundError: the batch does not exist."""
        return await self._transport.fetch(calls.batch(batch_id), timeout)

    async def cancel(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """End a batch early; its answers so far are kept. APIStatusError (409): the batch has ended."""
        return await self._transport.fetch(calls.batch_cancellation(batch_id), timeout)

    async def wait(self, batch_id: str, *, poll: float = 5.0, timeout: float | None = None) -> Batch:
        """Return the batch once it has ended, successfully or not; poll every `poll` seconds."""
        while (batch := await self.retrieve(batch_id, timeout=timeout)).status not in ENDED:
            await asyncio.sleep(poll)
        return batch


class Batches(Resource):
    """The `/batches` endpoints."""

    def create(
        self, *, timeout: float | None = None, extra_body: Object | None = None, **params: Unpack[BatchParams]
    ) -> Batch:
        """Start a batch from an uploaded file; see `BatchRequest`.

        A broken connection is not retried, because the batch may have started.
        """
        return self._transport.fetch(calls.batch_creation(params, extra_body), timeout)

    def list(self, *, after: str | None = None, limit: int | None = None, timeout: float | None = None) -> BatchList:
        """Return all batches, the newest first; `after` is the last id of the previous page."""
        return self._transport.fetch(calls.batch_list(after, limit), timeout)

    def retrieve(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Return one batch and its progress. NotFoundError: the batch does not exist."""
        return self._transport.fetch(calls.batch(batch_id), timeout)

    def cancel(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """End a batch early; its answers so far are kept. APIStatusError (409): the batch has ended."""
        return self._transport.fetch(calls.batch_cancellation(batch_id), timeout)

    def wait(self, batch_id: str, *, poll: float = 5.0, timeout: float | None = None) -> Batch:
        """Return the batch once it has ended, successfully or not; poll every `poll` seconds."""
        while (batch := self.retrieve(batch_id, timeout=timeout)).status not in ENDED:
            time.sleep(poll)
        return batch
