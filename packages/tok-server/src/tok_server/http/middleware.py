"""Middleware of all requests: ids, access checks, counts, logging, and a common shape of errors and headers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from tok_core import EngineClosed, EngineDead
from tok_core.runtime import EXTRA_FIELDS
from tok_server.http.body import check_encoding
from tok_server.http.connections import Connection
from tok_server.http.context import CONTEXT, Context
from tok_server.observability import COUNTS, RequestCounts
from tok_server.wire import NOT_SERVED, OPENAI_ERRORS, UNAVAILABLE, ApiError, from_exception, new_id, unavailable

log = logging.getLogger("tok.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CLIENT_DISCONNECTED = 499  # in log and metrics only: the client has disconnected
# Polled by machines: logged at DEBUG.
DEBUG_LOGGED_PATHS = frozenset({"/health", "/ping", "/ready", "/load", "/metrics"})
# Prefixes of paths that count against the rate limits.
RATE_LIMITED_PREFIXES = ("/v1/", "/v2/", "/tokenize", "/detokenize", "/pooling", "/score", "/rerank")


@web.middleware
async def request_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run around every handler: check, count and log the request, and turn exceptions into error responses."""
    context = request.app[CONTEXT]
    counts = request[COUNTS] = RequestCounts(new_id("req"))
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.begin(request.writer, request.content)
    context.open_requests += 1
    status = CLIENT_DISCONNECTED
    try:
        context.hosts.check(request)
        response: web.StreamResponse | None = context.origins.preflight(request.method, request.headers)
        if response is None:
            await context.throttle.admit()
            _check_access(request, context, counts)
            response = await handler(request)
        status = counts.failed or response.status
        return response
    except ConnectionError as error:
        raise asyncio.CancelledError from error
    except Exception as error:
        failure = from_exception(error, counts.id)
        status = failure.status
        context.metrics.refuse(failure.limit)
        if status >= 500:
            trace = error if status == 500 else None
            log.log(_failure_level(error, status), "%s: %s", counts.id, error or type(error).__name__, exc_info=trace)
        error_response = context.error_formats.get(request.path, OPENAI_ERRORS).respond(failure, counts.id)
        status = error_response.status
        return error_response
    finally:
        if isinstance(connection, Connection):
            connection.end()
        context.open_requests -= 1
        context.body_bytes -= counts.body_bytes
        if context.rate_limits:
            context.rate_limits.charge(counts.key, counts.tokens)
        _record(context, request, counts, status)


def _failure_level(error: Exception, status: int) -> int:
    """Return the log level of a failed request: INFO if none can be served now, which the log has at its cause."""
    not_open = isinstance(error, EngineDead) and error.min_open_priority is None
    if not_open or isinstance(error, EngineClosed) or (isinstance(error, ApiError) and status == UNAVAILABLE):
        return logging.INFO
    return logging.WARNING if status == NOT_SERVED else logging.ERROR


def _check_access(request: web.Request, context: Context, counts: RequestCounts) -> None:
    """Raise ApiError for a request that is refused regardless of its body."""
    context.origins.check(request.method, request.headers)
    counts.key = context.keys.check(request.path, request.headers)
    counts.tenant = context.keys.tenant(counts.key)
    if request.method == "POST":
        if context.draining:
            raise unavailable("the server is stopping", "draining")
        check_encoding(request)
        if context.rate_limits and request.path.startswith(RATE_LIMITED_PREFIXES):
            context.rate_limits.admit(counts.key)


async def set_response_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of every response, for `on_response_prepare`."""
    context = request.app[CONTEXT]
    headers = response.headers
    if COUNTS not in request:  # aiohttp refuses it before any middleware
        request[COUNTS] = RequestCounts(new_id("req"))
    headers["x-request-id"] = request[COUNTS].id
    if request.path in context.error_formats:
        headers["request-id"] = request[COUNTS].id  # the name that Anthropic's clients read
    headers["Server"] = "tok"  # hides which libraries the server uses
    headers["X-Content-Type-Options"] = "nosniff"
    if more := context.origins.headers(request.headers.get("Origin")):
        headers.update(more)
    if context.rate_limits and request.path.startswith(RATE_LIMITED_PREFIXES):
        headers.update(context.rate_limits.headers(request[COUNTS].key))
    if context.draining:
        headers["Connection"] = "close"
        response.force_close()


def _record(context: Context, request: web.Request, counts: RequestCounts, status: int) -> None:
    resource = request.match_info.route.resource
    endpoint = resource.canonical if resource else "other"  # not the path: the number of paths is unbounded
    now = time.monotonic()
    seconds = now - counts.started
    context.metrics.ended(endpoint, status, seconds)
    if status < 400:
        context.metrics.answered(counts)
        if (durations := counts.durations(now)) is not None:
            context.latencies.observe(durations)
    if context.telemetry is not None:
        context.telemetry.record(request, endpoint, counts, status)
    level = logging.DEBUG if endpoint in DEBUG_LOGGED_PATHS else logging.INFO
    if not log.isEnabledFor(level):
        return
    path = request.rel_url.raw_path[:500]  # as sent: decoded, it may contain line breaks
    log.log(
        level,
        "%s %s %s: %d, %.3f s",
        counts.id,
        request.method,
        path,
        status,
        seconds,
        extra={EXTRA_FIELDS: _log_fields(request, counts, status, seconds, path)},
    )


def _log_fields(
    request: web.Request, counts: RequestCounts, status: int, seconds: float, path: str
) -> dict[str, object]:
    """Return the fields that a structured log adds to a request's line."""
    fields: dict[str, object] = {
        "request_id": counts.id,
        "method": request.method,
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "client": request.remote,
    }
    if counts.key >= 0:
        fields["api_key"] = counts.key
    if counts.queued is not None:
        fields |= {"prompt_tokens": counts.prompt_tokens, "cached_tokens": counts.cached_tokens}
        fields["output_tokens"] = counts.output_tokens
    if counts.first_token is not None:
        fields["first_token_seconds"] = round(counts.first_token - counts.started, 6)
    return fields
