"""Files: the input and output of batches."""

from __future__ import annotations

from os import PathLike
from typing import Literal

from tok_client.requests import Object, calls
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.types import ExpiresAfter, FileDeleted, FileList, FileObject


class AsyncFiles(AsyncResource):
    """The `/files` endpoints."""

    async def create(
        self,
        *,
        file: str | PathLike[str] | bytes,
        purpose: str = "batch",
        filename: str | None = None,
        expires_after: ExpiresAfter | Object | None = None,
        timeout: float | None = None,
    ) -> FileObject:
        """Upload the file at a path, or the given bytes. A file is read in pieces while it is sent.

        `filename` is the file's name on the server. OSError: the file cannot be read. TypeError: `file` is neither.
        """
        return await self._transport.fetch(calls.file_creation(file, purpose, filename, expires_after), timeout)

    async def list(
        self,
        *,
        after: str | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] | None = None,
        purpose: str | None = None,
        timeout: float | None = None,
    ) -> FileList:
        """Return the files that the server stores; `after` is the last id of the previous page."""
        return await self._transport.fetch(calls.file_list(after, limit, order, purpose), timeout)

    async def retrieve(self, file_id: str, *, timeout: float | None = None) -> FileObject:
        """Return one file, without its content. NotFoundError: the file does not exist."""
        return await self._transport.fetch(calls.file(file_id), timeout)

    async def content(self, file_id: str, *, timeout: float | None = None) -> bytes:
        """Return a file's content, held in memory; use `save` for large files."""
        return await self._transport.fetch(calls.file_content(file_id), timeout)

    async def save(self, file_id: str, path: str | PathLike[str], *, timeout: float | None = None) -> int:
        """Write a file's content to `path`, which appears once it is complete. Returns its size in bytes.

        OSError: the file cannot be written.
        """
        return await self._transport.save(calls.file_content(file_id), path, timeout)

    async def delete(self, file_id: str, *, timeout: float | None = None) -> FileDeleted:
        """Delete a file. APIStatusError (409): a batch still reads it."""
        return await self._transport.fetch(calls.file_deletion(file_id), timeout)


class Files(Resource):
    """The `/files` endpoints."""

    def create(
        self,
        *,
        file: str | PathLike[str] | bytes,
        purpose: str = "batch",
        filename: str | None = None,
        expires_after: ExpiresAfter | Object | None = None,
        timeout: float | None = None,
    ) -> FileObject:
        """Upload the file at a path, or the given bytes. A file is read in pieces while it is sent.

        `filename` is the file's name on the server. OSError: the file cannot be read. TypeError: `file` is neither.
        """
        return self._transport.fetch(calls.file_creation(file, purpose, filename, expires_after), timeout)

    def list(
        self,
        *,
        after: str | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] | None = None,
        purpose: str | None = None,
        timeout: float | None = None,
    ) -> FileList:
        """Return the files that the server stores; `after` is the last id of the previous page."""
        return self._transport.fetch(calls.file_list(after, limit, order, purpose), timeout)

    def retrieve(self, file_id: str, *, timeout: float | None = None) -> FileObject:
        """Return one file, without its content. NotFoundError: the file does not exist."""
        return self._transport.fetch(calls.file(file_id), timeout)

    def content(self, file_id: str, *, timeout: float | None = None) -> bytes:
        """Return a file's content, held in memory; use `save` for large files."""
        return self._transport.fetch(calls.file_content(file_id), timeout)

    def save(self, file_id: str, path: str | PathLike[str], *, timeout: float | None = None) -> int:
        """Write a file's content to `path`, which appears once it is complete. Returns its size in bytes.

        OSError: the file cannot be written.
        """
        return self._transport.save(calls.file_content(file_id), path, timeout)

    def delete(self, file_id: str, *, timeout: float | None = None) -> FileDeleted:
        """Delete a file. APIStatusError (409): a batch still reads it."""
        return self._transport.fetch(calls.file_deletion(file_id), timeout)
