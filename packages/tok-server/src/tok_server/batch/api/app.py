"""Add batches to a server with a data directory; without one, their endpoints answer 501."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from tok_core import AsyncEngine
from tok_server.batch.api.metrics import BatchCollector, BatchStats
from tok_server.batch.api.service import BatchLimits, BatchService
from tok_server.batch.storage import StoreError
from tok_server.http import CONTEXT, Context
from tok_server.openai import ServedModel
from tok_server.settings import Settings
from tok_server.wire import not_served

log = logging.getLogger("tok.server")

BATCHES = web.AppKey("BATCHES", BatchService)
NO_DATA_DIRECTORY = "files and batches need a data directory; start the server with --data-dir DIR"


def add_batches(app: web.Application, engine: AsyncEngine, settings: Settings) -> Callable[[], BatchStats | None]:
    """Add the batch service, which lives as long as the application, if there is a data directory.

    Starting the application raises StoreError if the directory cannot be used and `settings.require_data_dir`; without
    it the server has no batches then, and its log says why. The result returns the service's statistics, None without
    it.
    """
    if settings.data_dir is None:
        return lambda: None
    context = app[CONTEXT]
    served = ServedModel(
        engine,
        settings.model_names,
        settings.formats,
        settings.max_n,
        settings.share_prefixes,
        settings.min_client_priority,
    )
    service = app[BATCHES] = BatchService(
        Path(settings.data_dir).expanduser(),
        served,
        BatchLimits(file=settings.max_file, line=settings.max_body, quota=settings.data_quota),
        ready=lambda: context.ready,
        paused=lambda: context.draining,
    )
    context.background_requests = lambda: served.background_requests.requests
    context.metrics.add(BatchCollector(service.stats))
    app.cleanup_ctx.append(_service_lifetime)
    return lambda: service.stats() if service.off is None else None


async def _service_lifetime(app: web.Application) -> AsyncIterator[None]:
    service, settings = app[BATCHES], app[CONTEXT].settings
    try:
        await service.open()
        log.info("files and batches are kept in %s", settings.data_dir)
    except StoreError as error:
        if settings.require_data_dir:
            raise
        service.off = str(error)
        log.warning("files and batches are off: %s", error)
    yield
    await service.close()


def batch_service(request: web.Request) -> tuple[BatchService, Context]:
    """Return the server's batch service and context. Errors: ApiError 501 without a usable data directory."""
    service = request.app.get(BATCHES)
    if service is None:
        raise not_served(NO_DATA_DIRECTORY, "not_configured")
    if service.off is not None:
        message = f"files and batches are off: {service.off}; start the server with another --data-dir DIR"
        raise not_served(message, "not_configured")
    return service, request.app[CONTEXT]
