"""A typed client for OpenAI-compatible servers, sync and async; the wire types are in `tok_client.types`."""

from __future__ import annotations

from tok_client.async_client import AsyncClient
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
from tok_client.mapping.iterate import AsyncMap, Map
from tok_client.mapping.output import SavedAnswer, read_answers
from tok_client.mapping.result import MapResult
from tok_client.scoring import majority, pass_at_k
from tok_client.transport.backoff import Backoff
from tok_client.transport.streaming import AsyncStream, Stream
from tok_client.types import (
    UNSET,
    Batch,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    EmbeddingList,
    ErrorResponse,
    FileObject,
    Model,
    ModelList,
    Response,
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
    "AsyncMap",
    "AsyncStream",
    "AuthenticationError",
    "Backoff",
    "BadRequestError",
    "Batch",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "Client",
    "Completion",
    "CompletionRequest",
    "EmbeddingList",
    "ErrorResponse",
    "FileObject",
    "InternalServerError",
    "Map",
    "MapResult",
    "Model",
    "ModelList",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestTooLargeError",
    "Response",
    "SavedAnswer",
    "Stream",
    "StreamError",
    "TokError",
    "UnprocessableEntityError",
    "UnsetType",
    "Usage",
    "known_fields",
    "majority",
    "pass_at_k",
    "read_answers",
]
