"""A typed client for OpenAI-compatible servers, sync and async; the wire types are in `tok_client.types`."""

from __future__ import annotations

from tok_client.async_client import AsyncClient
from tok_client.backoff import Backoff
from tok_client.client import Client
from tok_client.errors import (
    APIConnectionError,
    APIResponseError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestTooLargeError,
    StreamError,
    TokError,
    UnprocessableEntityError,
)
from tok_client.streaming import AsyncStream, Stream
from tok_client.types import (
    UNSET,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ErrorResponse,
    Model,
    ModelList,
    UnsetType,
    Usage,
    known_fields,
)

__all__ = [
    "UNSET",
    "APIConnectionError",
    "APIResponseError",
    "APIStatusError",
    "APITimeoutError",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationError",
    "Backoff",
    "BadRequestError",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "Client",
    "Completion",
    "CompletionRequest",
    "ErrorResponse",
    "InternalServerError",
    "Model",
    "ModelList",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestTooLargeError",
    "Stream",
    "StreamError",
    "TokError",
    "UnprocessableEntityError",
    "UnsetType",
    "Usage",
    "known_fields",
]
