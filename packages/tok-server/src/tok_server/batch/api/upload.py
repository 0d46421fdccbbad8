"""Receive an uploaded file: stream a multipart body to disk, with one piece in memory at a time."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable
from contextlib import ExitStack
from typing import IO, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from tok_client.decoders import decoder
from tok_client.types import ExpiresAfter, FileObject
from tok_server.batch.api.service import BatchService
from tok_server.batch.execution import uninterrupted
from tok_server.batch.storage import QuotaExceeded, is_full
from tok_server.http import MIN_READ_BYTES, check_compression_ratio
from tok_server.wire import SERVER, ApiError, invalid, limited, new_id

T = TypeVar("T")

PURPOSE = "batch"
MAX_FIELD_BYTES = 1024  # bytes of a field that is not the file
MAX_PARTS = 8
PIECE_BYTES = 1 << 20  # bytes read, and written to the disk, at a time
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
DAY = 86_400
DEFAULT_KEEP_SECONDS = 30 * DAY  # seconds, unless the upload says otherwise
MIN_KEEP_SECONDS, MAX_KEEP_SECONDS = 3600, 30 * DAY
IDENTITY_ENCODINGS = ("", "7bit", "8bit", "binary")
MALFORMED_ERRORS = (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError)


class Upload:
    """Receiver of one file for `owner`. MIN_READ_BYTES, or all that remain, must arrive every `timeout` seconds."""

    def __init__(self, service: BatchService, timeout: float, owner: str) -> None:
        self._service = service
        self._owner = owner
        self._timeout = self._left = timeout
        self._arrived = 0  # bytes since the timeout was last reset
        self._id = new_id("file")
        self._fields: dict[str, str] = {}
        self._name: str | None = None
        self._size = 0

    async def receive(self, request: web.Request) -> FileObject:
        """Receive and store the file. Errors: ApiError 400, 408 (slow), 413 (large), 507 (disk or quota full)."""
        if request.content_type != "multipart/form-data":
            raise invalid("Content-Type", f"Content-Type is {request.content_type!r}; allowed: multipart/form-data")
        try:
            await self._receive(request)
            seconds = self._keep_seconds()
            file = self._file(seconds)
        except BaseException as error:
            self._discard()
            raise _client_error(error) from error
        try:
            await self._service.add_file(file, self._owner, seconds)
        except (OSError, sqlite3.Error) as error:  # the file is kept even if this is cancelled
            self._discard()
            raise _client_error(error) from error
        return file

    def _discard(self) -> None:
        self._service.data_directory.blobs.discard(self._id)
        self._service.quota.remove(self._id)

    async def _receive(self, request: web.Request) -> None:
        reader = await request.multipart()
        count = 0
        while (part := await self._with_timeout(reader.next())) is not None:
            count += 1
            if count > MAX_PARTS or not isinstance(part, BodyPartReader):
                raise invalid(None, f"the body has unexpected parts; allowed: file, {', '.join(FIELDS)}")
            _check_encoding(part)
            if part.name == "file":
                await self._read_file(part, request)
            else:
                await self._read_field(part)

    async def _read_field(self, part: BodyPartReader) -> None:
        name = part.name or ""
        if name not in FIELDS:
            raise invalid(name[:80] or None, f"{name[:80]!r} is not a field of an upload; allowed: {_field_names()}")
        if name in self._fields:
            raise invalid(name, f"{name} is given twice; allowed: once")
        data = b""
        while piece := await self._with_timeout(part.read_chunk(MAX_FIELD_BYTES)):
            data += piece
            self._count_arrived(len(piece))
            if len(data) > MAX_FIELD_BYTES:
                raise invalid(name, f"{name} has more than {MAX_FIELD_BYTES} bytes")
        self._fields[name] = data.decode(errors="replace")

    async def _read_file(self, part: BodyPartReader, request: web.Request) -> None:
        if self._name is not None:
            raise invalid("file", "file is given twice; allowed: once")
        # The client's file name is only displayed, never used as a path.
        self._name = (part.filename or "file").encode(errors="replace").decode()[:255]
        with ExitStack() as opened:
            stream = opened.enter_context(self._service.data_directory.blobs.writing(self._id))
            await self._copy(part, stream, request)
            # If cancelled, wait for the close all the same: the file is deleted next, and must not reappear.
            await uninterrupted(asyncio.to_thread(opened.pop_all().close))

    async def _copy(self, part: BodyPartReader, stream: IO[bytes], request: web.Request) -> None:
        quota, max_bytes = self._service.quota, self._service.limits.file
        buffer = bytearray()
        while piece := await self._with_timeout(part.read_chunk(PIECE_BYTES)):
            self._size += len(piece)
            self._count_arrived(len(piece))
            if self._size > max_bytes:
                raise ApiError(413, f"file has more than {max_bytes} bytes", param="file", code="file_too_large")
            if quota.limit is not None and self._size > quota.limit:
                raise limited("data_quota", 413, f"file has more than {quota.limit} bytes", param="file")
            check_compression_ratio(request)
            quota.add(self._id, len(piece))
            buffer += piece
            if len(buffer) >= PIECE_BYTES:
                await asyncio.to_thread(stream.write, buffer)
                buffer = bytearray()
        await asyncio.to_thread(stream.write, buffer)

    async def _with_timeout(self, awaitable: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                return await awaitable
        except TimeoutError as error:
            message = f"{self._arrived} bytes of the body arrived within {self._timeout:g} seconds"
            raise limited(
                "body_timeout",
                408,
                f"{message}; required: {MIN_READ_BYTES}, or all that remain",
                code="request_timeout",
            ) from error
        finally:
            self._left -= time.monotonic() - began  # excludes the time of writing to disk

    def _count_arrived(self, size: int) -> None:
        self._arrived += size
        if self._arrived >= MIN_READ_BYTES:
            self._arrived, self._left = 0, self._timeout

    def _file(self, seconds: int) -> FileObject:
        """Return the file's record. Errors: ApiError 400 for a field that is missing or not allowed."""
        if self._name is None:
            raise invalid("file", "file is required, but missing")
        purpose = self._fields.get("purpose")
        if purpose is None:
            raise invalid("purpose", f"purpose is required, but missing; allowed: {PURPOSE!r}")
        if purpose != PURPOSE:
            raise invalid("purpose", f"purpose is {purpose[:80]!r}; allowed: {PURPOSE!r}")
        now = int(self._service.now())
        return FileObject(
            id=self._id,
            bytes=self._size,
            created_at=now,
            expires_at=now + seconds,
            filename=self._name,
            purpose=PURPOSE,
        )

    def _keep_seconds(self) -> int:
        anchor, seconds = (self._fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return DEFAULT_KEEP_SECONDS
        decoder(ExpiresAfter)  # prepares the type under a lock: the conversion is then safe in any thread
        try:
            after = msgspec.convert({"anchor": anchor, "seconds": seconds}, ExpiresAfter, strict=False)
        except msgspec.ValidationError as error:
            allowed = f"'created_at' and an integer from {MIN_KEEP_SECONDS} to {MAX_KEEP_SECONDS}"
            found = " and ".join("nothing" if one is None else repr(one[:80]) for one in (anchor, seconds))
            message = f"expires_after[anchor] and expires_after[seconds] are {found}; allowed: {allowed}"
            raise invalid("expires_after", message) from error
        return keep_seconds_of(after, "expires_after")


def keep_seconds_of(after: ExpiresAfter, name: str) -> int:
    """Return the seconds for which a file is to be kept. Errors: ApiError 400 naming a field of `name`."""
    if after.anchor != "created_at":
        raise invalid(f"{name}.anchor", f"{name}.anchor is {after.anchor[:80]!r}; allowed: 'created_at'")
    if not MIN_KEEP_SECONDS <= after.seconds <= MAX_KEEP_SECONDS:
        allowed = f"integers from {MIN_KEEP_SECONDS} to {MAX_KEEP_SECONDS}"
        raise invalid(f"{name}.seconds", f"{name}.seconds is {after.seconds}; allowed: {allowed}")
    return after.seconds


def _field_names() -> str:
    return ", ".join(("file", *FIELDS))


def _check_encoding(part: BodyPartReader) -> None:
    for header in ("Content-Encoding", "Content-Transfer-Encoding"):
        if (value := part.headers.get(header, "")).lower() not in IDENTITY_ENCODINGS:
            raise invalid(header, f"{header} of a part is {value[:80]!r}; allowed: none")


def disk_full_error(error: BaseException) -> ApiError | None:
    """Return the response to a request for which there is no space: 507, which clients should not retry at once."""
    if not is_full(error):
        return None
    if isinstance(error, QuotaExceeded):
        full = limited("data_quota", 507, f"{error.strerror}; delete files to free space", param="file")
    else:
        full = ApiError(507, "the server's disk is full", kind=SERVER, code="disk_full")
    full.headers["x-should-retry"] = "false"
    return full


def _client_error(error: BaseException) -> BaseException:
    """Return the error to report to the client."""
    if full := disk_full_error(error):
        return full
    if isinstance(error, MALFORMED_ERRORS):
        reason = (str(error) or "it is truncated").splitlines()[-1].strip()  # the first line of some is "400, message:"
        return invalid(None, f"the body is not valid multipart/form-data: {reason[:200]}")
    return error
