"""State of one request: streamed, unstreamed or embedded, and the parts of it that replicas compute."""

from __future__ import annotations

from tok_core.engine.requests.embedding import EmbedRequest, check_embedding
from tok_core.engine.requests.notifications import notify, reported_error
from tok_core.engine.requests.request_parts import RequestPart
from tok_core.engine.requests.request_state import OpenRequest, Sink, StreamedTokens
from tok_core.engine.requests.streamed_request import StreamedRequest
from tok_core.engine.requests.unstreamed_request import UnstreamedRequest

__all__ = [
    "EmbedRequest",
    "OpenRequest",
    "RequestPart",
    "Sink",
    "StreamedRequest",
    "StreamedTokens",
    "UnstreamedRequest",
    "check_embedding",
    "notify",
    "reported_error",
]
