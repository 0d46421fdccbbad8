"""Notify the owners of requests, and convert exceptions to the errors reported to them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError

from tok_core.engine.requests.request_state import OpenRequest, Sink
from tok_core.errors import EngineClosed, RequestFailed, TokError

log = logging.getLogger("tok_core")


def notify(requests: Sequence[OpenRequest]) -> None:
    """Call each sink once with its requests. An exception in one sink is logged and does not affect others."""
    by_sink: dict[Sink, list[OpenRequest]] = {}
    for request in requests:
        by_sink.setdefault(request.sink, []).append(request)
    for sink, owned in by_sink.items():
        try:
            sink(owned)
        except Exception:
            log.exception("the callback of %d requests failed, %s one of them", len(owned), owned[0].request_id)


def reported_error(error: Exception) -> TokError:
    """Return the error to report to the owner of a request that failed with `error`."""
    if isinstance(error, TokError):
        return error
    if isinstance(error, CancelledError):
        return EngineClosed("the engine was closed")
    return RequestFailed(f"the request cannot be computed: {type(error).__name__}: {error}")
