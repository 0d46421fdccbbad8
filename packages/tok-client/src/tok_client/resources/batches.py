"""Batches: files of requests, answered when there is room."""

from __future__ import annotations

import asyncio
import time
from typing import Unpack

from tok_client.requests import BatchParams, Object, calls
from tok_client.transport import BlockingTransport, Transport
from tok_client.types import Batch, BatchList

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class AsyncBatches:
    """`/batches`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self, *, timeout: float | None = None, extra_body: Object | None = None, **params: Unpack[BatchParams]
    ) -> Batch:
        """Begins a batch with an uploaded file; see `BatchRequest`.

        Not tried again where a connection broke: the batch may have begun.
        """
        return await self._transport.fetch(calls.batch_creation(params, extra_body), timeout)

    async def list(
        self, *, after: str | None = None, limit: int | None = None, timeout: float | None = None
    ) -> BatchList:
        """All batches, the newest first; `after`: the last id of the page before."""
        return await self._transport.fetch(calls.batch_list(after, limit), timeout)

    async def retrieve(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """One batch, and how far it is. NotFoundError: there is none."""
        return await self._transport.fetch(calls.batch(batch_id), timeout)

    async def cancel(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Ends a batch early; what is answered is kept. APIStatusError (409): it has ended."""
        return await self._transport.fetch(calls.batch_cancellation(batch_id), timeout)

    async def wait(self, batch_id: str, *, poll: float = 5.0, timeout: float | None = None) -> Batch:
        """The batch once it has ended, well or not; asks every `poll` seconds."""
        while (batch := await self.retrieve(batch_id, timeout=timeout)).status not in ENDED:
            await asyncio.sleep(poll)
        return batch


class Batches:
    """`/batches`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def create(
        self, *, timeout: float | None = None, extra_body: Object | None = None, **params: Unpack[BatchParams]
    ) -> Batch:
        """Begins a batch with an uploaded file; see `BatchRequest`.

        Not tried again where a connection broke: the batch may have begun.
        """
        return self._transport.fetch(calls.batch_creation(params, extra_body), timeout)

    def list(self, *, after: str | None = None, limit: int | None = None, timeout: float | None = None) -> BatchList:
        """All batches, the newest first; `after`: the last id of the page before."""
        return self._transport.fetch(calls.batch_list(after, limit), timeout)

    def retrieve(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """One batch, and how far it is. NotFoundError: there is none."""
        return self._transport.fetch(calls.batch(batch_id), timeout)

    def cancel(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Ends a batch early; what is answered is kept. APIStatusError (409): it has ended."""
        return self._transport.fetch(calls.batch_cancellation(batch_id), timeout)

    def wait(self, batch_id: str, *, poll: float = 5.0, timeout: float | None = None) -> Batch:
        """The batch once it has ended, well or not; asks every `poll` seconds."""
        while (batch := self.retrieve(batch_id, timeout=timeout)).status not in ENDED:
            time.sleep(poll)
        return batch
