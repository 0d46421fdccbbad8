"""ApiError: an error response to an HTTP request, in the shape that OpenAI's clients understand.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

`param` names the field, as a path if it is nested ("messages[1].content").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from tok_client.types import ErrorBody, ErrorResponse
from tok_core import ContextLengthExceeded, EngineError, EngineResumed, InvalidField, RequestFailed

INVALID = "invalid_request_error"
SERVER = "server_error"
NOT_SERVED = 501
UNAVAILABLE = 503
OVERLOADED = 529  # of Anthropic's API, instead of 503
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class ApiError(Exception):
    """A request that cannot be answered: HTTP status and the error object's four members.

    `limit`: name of the limit that refused the request, as in `tok_server.settings.Limits`; None: another reason.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.limit = limit

    def body(self) -> bytes:
        """Return the error object as JSON."""
        error = ErrorBody(message=self.message, type=self.kind, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorResponse(error=error))

    def response(self) -> web.Response:
        """Return the whole HTTP response."""
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=self.headers)


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How an API writes errors.

    kind     wire type of their body
    respond  returns the HTTP response to an error, given the id of its request
    """

    kind: type[msgspec.Struct]
    respond: Callable[[ApiError, str], web.Response]


OPENAI_ERRORS = ErrorFormat(ErrorResponse, lambda error, _: error.response())


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return a 400: the request contains something that is not allowed."""
    return ApiError(400, message, param=param, code=code)


def invalid_field(error: InvalidField, name: str) -> ApiError:
    """Return the error as ApiError (400) about the field `name`."""
    code = CONTEXT_LENGTH_EXCEEDED if isinstance(error, ContextLengthExceeded) else None
    return invalid(name, str(error.renamed(name)), code)


def unsupported(path: str, message: str) -> ApiError:
    """Return a 400: OpenAI defines the field or value at `path`, but this server does not support it."""
    return invalid(path, f"{path}: {message}", "unsupported_parameter")


def not_served(message: str, code: str) -> ApiError:
    """Return a 501: this server does not offer the feature. A header stops clients' usual retries of 5xx."""
    return ApiError(NOT_SERVED, message, code=code, headers={"x-should-retry": "false"})


def unavailable(message: str, code: str) -> ApiError:
    """Return a 503: the engine cannot answer now; clients may retry."""
    return ApiError(UNAVAILABLE, message, kind=SERVER, code=code, headers={"Retry-After": "1"})


def limited(
    limit: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    kind: str | None = None,
    code: str | None = None,
    retry_after: float | None = None,
) -> ApiError:
    """Return the error of a request beyond one of the server's limits; `limit` is its name and that of its flag.

    retry_after  seconds after which a retry may succeed; None: no retry will
    """
    headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
    kind = kind or (SERVER if status >= 500 else INVALID)
    text = f"{message} (--{limit.replace('_', '-')})"
    return ApiError(status, text, param=param, kind=kind, code=code or limit, headers=headers, limit=limit)


def internal(request_id: str) -> ApiError:
    """Return a 500: a defect of the server. Its log has the details, the response has not."""
    message = f"internal error; see the server's log for request {request_id}"
    return ApiError(500, message, kind=SERVER, code="internal_error")


def from_exception(error: Exception, request_id: str) -> ApiError:
    """Return the ApiError for any exception that a handler may raise."""
    match error:
        case ApiError():
            return error
        case InvalidField(field=field):
            return invalid(field, str(error))
        case RequestFailed():
            return ApiError(500, str(error), kind=SERVER, code="request_failed")
        case EngineResumed():  # not a 503, which clients repeat
            return ApiError(400, str(error), code="engine_resumed")
        case EngineError():
            return unavailable(str(error), "engine_unavailable")
        case web.HTTPException():
            return _of_http(error)
        case _:
            return internal(request_id)


def too_large(max_bytes: int | None) -> ApiError:
    """Return a 413: a body of more than `max_bytes` bytes."""
    message = "the body is too large" if max_bytes is None else f"the body has more than {max_bytes} bytes"
    return limited("max_body", 413, message, code="request_too_large")


def _of_http(error: web.HTTPException) -> ApiError:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return too_large(None)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"method {error.method} is not allowed for this URL; allowed: {allowed}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
        case web.HTTPNotFound():
            message = "this URL does not exist; most of the API's URLs begin with /v1/, /openapi.json lists them"
            return ApiError(404, message, code="not_found")
        case _:
            return ApiError(error.status, error.text or error.reason)
