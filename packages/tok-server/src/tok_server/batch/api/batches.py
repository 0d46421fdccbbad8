"""/v1/batches: files of requests, answered in the background."""

from __future__ import annotations

import re
import sqlite3
from typing import Annotated

import msgspec
from aiohttp import web

from tok_client.types import UNSET, Batch, BatchList, BatchRequest, BatchRequestCounts, known_fields
from tok_server.batch.api.app import batches_of
from tok_server.batch.api.service import BatchService, TooMany
from tok_server.batch.api.upload import disk_full, seconds_of
from tok_server.batch.storage import BEFORE_THE_END, ENDED, Missing, StoredJob
from tok_server.http import decode_members, read_body
from tok_server.observability import COUNTS
from tok_server.openai import ENDPOINTS, value_or_none
from tok_server.wire import ApiError, BadJson, Operation, decode, encode, invalid, json_of, new_id, read_query

MAX_LISTED_BATCHES = 100  # batches per page of a list
WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
MAX_WINDOW_HOURS = 336  # hours
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512  # entries; characters of a key, and of a value


class ListBatches(msgspec.Struct, frozen=True, kw_only=True):
    """Query of `GET /v1/batches`."""

    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED_BATCHES)] = 20


async def create(request: web.Request) -> web.Response:
    """Create a batch from an uploaded file."""
    service, context = batches_of(request)
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    asked = await context.run_in_thread(lambda: _read(body))
    job = _job(asked, service, context.settings.model_name, request[COUNTS].tenant)
    try:
        return _json(await service.create(job))
    except Missing as error:
        raise invalid("input_file_id", f"input_file_id: {error}") from error
    except TooMany as error:
        raise ApiError(429, str(error), code="too_many_batches", headers={"Retry-After": "60"}) from error
    except sqlite3.Error as error:
        raise disk_full(error) or error from error


async def list_batches(request: web.Request) -> web.Response:
    """List the caller's batches, newest first."""
    service, _ = batches_of(request)
    query = read_query(request, ListBatches)
    try:
        page = await service.ask(lambda store: store.jobs(query.after, query.limit, request[COUNTS].tenant))
    except Missing as error:
        raise invalid("after", str(error)) from error
    batches = [service.current(job) for job in page.records]
    first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
    return _json(BatchList(data=batches, first_id=first, last_id=last, has_more=page.more))


async def retrieve(request: web.Request) -> web.Response:
    """Retrieve a batch and its progress."""
    service, _ = batches_of(request)
    return _json(await _batch(service, request))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a batch; answers so far are kept."""
    service, _ = batches_of(request)
    before = await _batch(service, request)
    if before.status in ENDED or before.status == "finalizing":
        allowed = ", ".join(map(repr, BEFORE_THE_END))
        message = f"batch {before.id!r} cannot be cancelled: its status is {before.status!r}; allowed: {allowed}"
        raise ApiError(409, message, param="batch_id", code="batch_ended")
    try:
        return _json(await service.cancel(before.id, request[COUNTS].tenant))
    except sqlite3.Error as error:
        raise disk_full(error) or error from error


async def _batch(service: BatchService, request: web.Request) -> Batch:
    try:
        return await service.batch(request.match_info["id"], request[COUNTS].tenant)
    except Missing as error:
        raise ApiError(404, str(error), param="batch_id", code="not_found") from error


def _read(body: bytes) -> BatchRequest:
    for name in decode_members(body):
        if name not in known_fields(BatchRequest):
            allowed = ", ".join(sorted(known_fields(BatchRequest)))
            raise invalid(name[:80], f"{name[:80]!r} is no field of a batch; allowed: {allowed}")
    try:
        return decode(body, BatchRequest)
    except BadJson as error:
        raise invalid(error.path, str(error)) from error


def _job(asked: BatchRequest, service: BatchService, model: str, owner: str) -> StoredJob:
    """Return a new batch for the request. Errors: ApiError 400."""
    if asked.endpoint not in ENDPOINTS:
        allowed = ", ".join(map(repr, ENDPOINTS))
        raise invalid("endpoint", f"endpoint is {asked.endpoint[:80]!r}; allowed: {allowed}")
    metadata, keep = value_or_none(asked.metadata), value_or_none(asked.output_expires_after)
    _check_metadata(metadata or {})
    now, window = service.now(), _window(asked.completion_window)
    batch = Batch(
        id=new_id("batch").replace("-", "_"),
        endpoint=asked.endpoint,
        model=model,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        status="validating",
        created_at=now,
        expires_at=now + window,
        request_counts=BatchRequestCounts(),
        usage=UNSET,
        metadata=metadata,
    )
    return StoredJob(
        batch=batch,
        keep_seconds=None if keep is None else seconds_of(keep, "output_expires_after"),
        deadline=service.clock.now() + window,
        owner=owner,
    )


def _window(window: str) -> int:
    """Return the seconds of a completion window such as "24h". Errors: ApiError 400."""
    found = WINDOW.fullmatch(window)
    if found is None or int(found[1]) > MAX_WINDOW_HOURS:
        allowed = f"'24h', or other whole hours from 1h to {MAX_WINDOW_HOURS}h"
        raise invalid("completion_window", f"completion_window is {window[:80]!r}; allowed: {allowed}")
    return int(found[1]) * 3600


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MOST_METADATA:
        raise invalid("metadata", f"metadata has {len(metadata)} entries; allowed: at most {MOST_METADATA}")
    for key, value in metadata.items():
        if len(key) > LONGEST_KEY or len(value) > LONGEST_VALUE:
            allowed = f"keys of at most {LONGEST_KEY} characters, values of at most {LONGEST_VALUE}"
            raise invalid("metadata", f"metadata has an entry {key[:80]!r} that is too long; allowed: {allowed}")


def _json(found: Batch | BatchList) -> web.Response:
    return web.Response(body=encode(found), content_type="application/json")


_FOUND = {200: json_of(Batch)}

OPERATIONS = (
    Operation("POST", "/v1/batches", create, request=json_of(BatchRequest), answers=_FOUND, errors=(501, 507)),
    Operation(
        "GET", "/v1/batches", list_batches, query=ListBatches, answers={200: json_of(BatchList)}, errors=(400, 501)
    ),
    Operation("GET", "/v1/batches/{id}", retrieve, answers=_FOUND, errors=(404, 501)),
    Operation("POST", "/v1/batches/{id}/cancel", cancel, answers=_FOUND, errors=(404, 409, 501, 507)),
)
