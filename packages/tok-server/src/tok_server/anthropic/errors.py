"""Errors in the shape of Anthropic's API.

{"type": "error", "error": {"type": …, "message": …, "details": {"error_code": …}}, "request_id": …}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from aiohttp import web

from tok_client.types import UNSET, UnsetType
from tok_server.wire import CONTEXT_LENGTH_EXCEEDED, OVERLOADED, ApiError, ErrorFormat

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Status -> type of error; other statuses are "invalid_request_error" below 500, else "api_error"."""


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The code of an error, as in the errors of other endpoints."""

    error_code: str


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Kind and text of an error. `details`: absent if it has no code."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an error response, and data of the event that ends a failed stream."""

    type: Literal["error"] = "error"
    error: MessagesErrorBody
    request_id: str | UnsetType = UNSET


def error_body(error: ApiError, request_id: str | UnsetType = UNSET) -> bytes:
    """Return the error as JSON."""
    status = _status(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    # Clients look for "prompt is too long" to shorten the conversation.
    prefix = "prompt is too long: " if error.code == CONTEXT_LENGTH_EXCEEDED else ""
    details = UNSET if error.code is None else ErrorDetails(error_code=error.code)
    body = MessagesErrorBody(type=kind, message=prefix + error.message, details=details)
    return msgspec.json.encode(MessagesError(error=body, request_id=request_id))


def _status(error: ApiError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def _respond(error: ApiError, request_id: str) -> web.Response:
    body = error_body(error, request_id)
    return web.Response(status=_status(error), body=body, content_type="application/json", headers=error.headers)


MESSAGES_ERRORS = ErrorFormat(MessagesError, _respond)
