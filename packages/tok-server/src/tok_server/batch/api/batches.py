"""/v1/batches: files of requests, answered in the background."""

from __future__ import annotations

import re
import sqlite3
from typing import Annotated

import msgspec
from aiohttp import web

from tok_client.types import UNSET, Batch, BatchList, BatchRequest, BatchRequestCounts, known_fields
from tok_server.batch.api.app import batch_service
from tok_server.batch.api.service import BatchService, TooManyBatches
from tok_server.batch.api.upload import disk_full_error, keep_seconds_of
from tok_server.batch.storage import CANCELLABLE_STATUSES, ENDED, RecordNotFound, StoredJob
from tok_server.http import decode_members, read_body
from tok_server.observability import COUNTS
from tok_server.openai import ENDPOINTS, value_or_none
from tok_server.wire import ApiError, Operation, decode, invalid, json_of, json_response, new_id, read_query

MAX_LISTED_BATCHES = 100  # batches per page of a list
WINDOW_PATTERN = re.compile(r"([1-9][0-9]{0,2})h")
MAX_WINDOW_HOURS = 336
MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 64, 512


class ListBatches(msgspec.Struct, frozen=True, kw_only=True):
    """Query of `GET /v1/batches`."""

    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED_BATCHES)] = 20


async def create(request: web.Request) -> web.Response:
    """Create a batch from an uploaded file."""
    service, context = batch_service(request)
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    batch_request = await context.run_in_thread(lambda: _read(body))
    job = _new_job(batch_request, service, context.settings.model_name, request[COUNTS].tenant)
    try:
        return json_response(await service.create(job))
    except RecordNotFound as error:
        raise invalid("input_file_id", f"input_file_id: {error}") from error
    except TooManyBatches as error:
        raise ApiError(429, str(error), code="too_many_batches", headers={"Retry-After": "60"}) from error
    except sqlite3.Error as error:
        raise disk_full_error(error) or error from error


async def list_batches(request: web.Request) -> web.Response:
    """List the caller's batches, newest first."""
    service, _ = batch_service(request)
    query = read_query(request, ListBatches)
    try:
        page = await service.run_with_store(lambda store: store.jobs(query.after, query.limit, request[COUNTS].tenant))
    except RecordNotFound as error:
        raise invalid("after", str(error)) from error
    batches = [service.current(job) for job in page.records]
    first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
    return json_response(BatchList(data=batches, first_id=first, last_id=last, has_more=page.has_more))


async def retrieve(request: web.Request) -> web.Response:
    """Retrieve a batch and its progress."""
    service, _ = batch_service(request)
    return json_response(await _batch(service, request))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a batch; answers so far are kept."""
    service, _ = batch_service(request)
    batch = await _batch(service, request)
    if batch.status in ENDED or batch.status == "finalizing":
        allowed = ", ".join(map(repr, CANCELLABLE_STATUSES))
        message = f"batch {batch.id!r} cannot be cancelled: its status is {batch.status!r}; allowed: {allowed}"
        raise ApiError(409, message, param="batch_id", code="batch_ended")
    try:
        return json_response(await service.cancel(batch.id, request[COUNTS].tenant))
    except sqlite3.Error as error:
        raise disk_full_error(error) or error from error


async def _batch(service: BatchService, request: web.Request) -> Batch:
    try:
        return await service.batch(request.match_info["id"], request[COUNTS].tenant)
    except RecordNotFound as error:
        raise ApiError(404, str(error), param="batch_id", code="not_found") from error


def _read(body: bytes) -> BatchRequest:
    for name in decode_members(body):
        if name not in known_fields(BatchRequest):
            allowed = ", ".join(sorted(known_fields(BatchRequest)))
            raise invalid(name[:80], f"{name[:80]!r} is not a field of a batch; allowed: {allowed}")
    return decode(body, BatchRequest)


def _new_job(batch_request: BatchRequest, service: BatchService, model: str, owner: str) -> StoredJob:
    """Return a new batch for the request. Errors: ApiError 400."""
    if batch_request.endpoint not in ENDPOINTS:
        allowed = ", ".join(map(repr, ENDPOINTS))
        raise invalid("endpoint", f"endpoint is {batch_request.endpoint[:80]!r}; allowed: {allowed}")
    metadata, keep = value_or_none(batch_request.metadata), value_or_none(batch_request.output_expires_after)
    _check_metadata(metadata or {})
    now, window = service.now(), _window_seconds(batch_request.completion_window)
    batch = Batch(
        id=new_id("batch", "_"),
        endpoint=batch_request.endpoint,
        model=model,
        input_file_id=batch_request.input_file_id,
        completion_window=batch_request.completion_window,
        status="validating",
        created_at=now,
        expires_at=now + window,
        request_counts=BatchRequestCounts(),
        usage=UNSET,
        metadata=metadata,
    )
    return StoredJob(
        batch=batch,
        keep_seconds=None if keep is None else keep_seconds_of(keep, "output_expires_after"),
        deadline=service.clock.now() + window,
        owner=owner,
    )


def _window_seconds(window: str) -> int:
    """Return the seconds of a completion window such as "24h". Errors: ApiError 400."""
    result = WINDOW_PATTERN.fullmatch(window)
    if result is None or int(result[1]) > MAX_WINDOW_HOURS:
        allowed = f"'24h', or other whole hours from 1h to {MAX_WINDOW_HOURS}h"
        raise invalid("completion_window", f"completion_window is {window[:80]!r}; allowed: {allowed}")
    return int(result[1]) * 3600


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise invalid("metadata", f"metadata has {len(metadata)} entries; allowed: at most {MAX_METADATA_ENTRIES}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            allowed = (
                f"keys of at most {MAX_METADATA_KEY_CHARS} characters, values of at most {MAX_METADATA_VALUE_CHARS}"
            )
            raise invalid("metadata", f"metadata has an entry {key[:80]!r} that is too long; allowed: {allowed}")


_BATCH_ANSWER = {200: json_of(Batch)}

OPERATIONS = (
    Operation("POST", "/v1/batches", create, request=json_of(BatchRequest), answers=_BATCH_ANSWER, errors=(501, 507)),
    Operation(
        "GET", "/v1/batches", list_batches, query=ListBatches, answers={200: json_of(BatchList)}, errors=(400, 501)
    ),
    Operation("GET", "/v1/batches/{id}", retrieve, answers=_BATCH_ANSWER, errors=(404, 501)),
    Operation("POST", "/v1/batches/{id}/cancel", cancel, answers=_BATCH_ANSWER, errors=(404, 409, 501, 507)),
)
