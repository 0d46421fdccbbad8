"""Files: what batches read and write."""

from __future__ import annotations

from os import PathLike
from typing import Literal

from tok_client.requests import calls, upload
from tok_client.transport import BlockingTransport, Transport
from tok_client.types import ExpiresAfter, FileDeleted, FileList, FileObject


class AsyncFiles:
    """`/files`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self,
        *,
        file: str | PathLike[str] | bytes,
        purpose: str = "batch",
        filename: str | None = None,
        expires_after: ExpiresAfter | None = None,
        timeout: float | None = None,
    ) -> FileObject:
        """Uploads the file at a path, or these bytes. A file is read as it is sent, a piece at a time.

        `filename` is what the server shall call it. OSError: it cannot be read.
        """
        return await self._transport.fetch(upload(file, purpose, filename, expires_after), timeout)

    async def list(
        self,
        *,
        after: str | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] | None = None,
        purpose: str | None = None,
        timeout: float | None = None,
    ) -> FileList:
        """The files that the server keeps; `after`: the last id of the page before."""
        return await self._transport.fetch(calls.file_list(after, limit, order, purpose), timeout)

    async def retrieve(self, file_id: str, *, timeout: float | None = None) -> FileObject:
        """One file, without its content. NotFoundError: there is none."""
        return await self._transport.fetch(calls.file(file_id), timeout)

    async def content(self, file_id: str, *, timeout: float | None = None) -> bytes:
        """What a file holds, in memory; see `save` for large ones."""
        return await self._transport.fetch(calls.file_content(file_id), timeout)

    async def save(self, file_id: str, path: str | PathLike[str], *, timeout: float | None = None) -> int:
        """Writes what a file holds to `path`, which appears when it is whole; gives its size in bytes.

        OSError: it cannot be written.
        """
        return await self._transport.save(calls.file_content(file_id), path, timeout)

    async def delete(self, file_id: str, *, timeout: float | None = None) -> FileDeleted:
        """Deletes a file. APIStatusError (409): a batch still reads it."""
        return await self._transport.fetch(calls.file_deletion(file_id), timeout)


class Files:
    """`/files`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def create(
        self,
        *,
        file: str | PathLike[str] | bytes,
        purpose: str = "batch",
        filename: str | None = None,
        expires_after: ExpiresAfter | None = None,
        timeout: float | None = None,
    ) -> FileObject:
        """Uploads the file at a path, or these bytes. A file is read as it is sent, a piece at a time.

        `filename` is what the server shall call it. OSError: it cannot be read.
        """
        return self._transport.fetch(upload(file, purpose, filename, expires_after), timeout)

    def list(
        self,
        *,
        after: str | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] | None = None,
        purpose: str | None = None,
        timeout: float | None = None,
    ) -> FileList:
        """The files that the server keeps; `after`: the last id of the page before."""
        return self._transport.fetch(calls.file_list(after, limit, order, purpose), timeout)

    def retrieve(self, file_id: str, *, timeout: float | None = None) -> FileObject:
        """One file, without its content. NotFoundError: there is none."""
        return self._transport.fetch(calls.file(file_id), timeout)

    def content(self, file_id: str, *, timeout: float | None = None) -> bytes:
        """What a file holds, in memory; see `save` for large ones."""
        return self._transport.fetch(calls.file_content(file_id), timeout)

    def save(self, file_id: str, path: str | PathLike[str], *, timeout: float | None = None) -> int:
        """Writes what a file holds to `path`, which appears when it is whole; gives its size in bytes.

        OSError: it cannot be written.
        """
        return self._transport.save(calls.file_content(file_id), path, timeout)

    def delete(self, file_id: str, *, timeout: float | None = None) -> FileDeleted:
        """Deletes a file. APIStatusError (409): a batch still reads it."""
        return self._transport.fetch(calls.file_deletion(file_id), timeout)
