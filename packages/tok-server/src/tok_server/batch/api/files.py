"""/v1/files: input and output files of batches."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from typing import IO, Annotated, Literal

import msgspec
from aiohttp import web

from tok_client.types import FileDeleted, FileList, FileObject
from tok_server.batch.api.app import batch_service
from tok_server.batch.api.service import BatchService
from tok_server.batch.api.upload import FIELDS, PURPOSE, Upload, disk_full_error
from tok_server.batch.storage import FileInUse, RecordNotFound
from tok_server.observability import COUNTS
from tok_server.wire import ApiError, Media, Operation, invalid, json_of, json_response, raw, read_query

MAX_LISTED_FILES = 10_000  # files per page of a list
CONTENT = "application/octet-stream"
PIECE_BYTES = 1 << 18  # bytes of a file read, and then sent, at a time


class ListFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Query of `GET /v1/files`."""

    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED_FILES)] = MAX_LISTED_FILES
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


async def upload(request: web.Request) -> web.Response:
    """Upload a file as the input of a batch."""
    service, context = batch_service(request)
    context.admit(request[COUNTS].tenant)
    file = await Upload(service, context.settings.body_timeout, request[COUNTS].tenant).receive(request)
    return json_response(file)


async def list_files(request: web.Request) -> web.Response:
    """List the caller's files."""
    service, _ = batch_service(request)
    query = read_query(request, ListFiles)
    options = {"newest_first": query.order == "desc", "purpose": query.purpose, "owner": request[COUNTS].tenant}
    try:
        page = await service.run_with_store(lambda store: store.files(query.after, query.limit, **options))  # type: ignore[arg-type]
    except RecordNotFound as error:
        raise invalid("after", str(error)) from error
    ids = [file.id for file in page.records]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return json_response(FileList(data=page.records, first_id=first, last_id=last, has_more=page.has_more))


async def retrieve(request: web.Request) -> web.Response:
    """Retrieve a file without its content."""
    service, _ = batch_service(request)
    return json_response(await _file(service, request))


async def content(request: web.Request) -> web.StreamResponse:
    """Return a file's content."""
    service, _ = batch_service(request)
    file = await _file(service, request)
    path = service.data_directory.blobs.path(file.id)
    try:
        stream = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError as error:
        raise _not_found(f"the content of file {file.id!r} is missing") from error
    with stream:
        return await _send(request, stream)


async def _send(request: web.Request, stream: IO[bytes]) -> web.StreamResponse:
    """Send the file piece by piece, so that `tok_server.http.connections` can tell whether the client keeps reading."""
    response = web.StreamResponse(headers={"Content-Type": CONTENT})
    response.content_length = os.fstat(stream.fileno()).st_size
    await response.prepare(request)
    while request.method != "HEAD" and (piece := await asyncio.to_thread(stream.read, PIECE_BYTES)):
        await response.write(piece)
    await response.write_eof()
    return response


async def delete(request: web.Request) -> web.Response:
    """Delete a file that no open batch reads."""
    service, _ = batch_service(request)
    id = request.match_info["id"]
    try:
        await service.delete_file(id, request[COUNTS].tenant)
    except RecordNotFound as error:
        raise _not_found(str(error)) from error
    except FileInUse as error:
        raise ApiError(409, str(error), param="file_id", code="file_in_use") from error
    except sqlite3.Error as error:
        raise disk_full_error(error) or error from error
    return json_response(FileDeleted(id=id, deleted=True))


async def _file(service: BatchService, request: web.Request) -> FileObject:
    try:
        return await service.run_with_store(lambda store: store.file(request.match_info["id"], request[COUNTS].tenant))
    except RecordNotFound as error:
        raise _not_found(str(error)) from error


def _not_found(message: str) -> ApiError:
    return ApiError(404, message, param="file_id", code="not_found")


_UPLOAD_FORM = Media(
    "multipart/form-data",
    schema={
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            **{name: {"type": "string"} for name in FIELDS},
            "file": {"type": "string", "format": "binary"},
            "purpose": {"type": "string", "enum": [PURPOSE]},
        },
        "additionalProperties": False,
    },
)

OPERATIONS = (
    Operation(
        "POST", "/v1/files", upload, request=(_UPLOAD_FORM,), answers={200: json_of(FileObject)}, errors=(501, 507)
    ),
    Operation("GET", "/v1/files", list_files, query=ListFiles, answers={200: json_of(FileList)}, errors=(400, 501)),
    Operation("GET", "/v1/files/{id}", retrieve, answers={200: json_of(FileObject)}, errors=(404, 501)),
    Operation("GET", "/v1/files/{id}/content", content, answers={200: raw(CONTENT)}, errors=(404, 501)),
    Operation("DELETE", "/v1/files/{id}", delete, answers={200: json_of(FileDeleted)}, errors=(404, 409, 501, 507)),
)
