"""ApiError: what went wrong with one HTTP request, in the shape OpenAI's clients understand.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

`param` names the field, as a path where it lies deeper ("messages[1].content").
"""

from __future__ import annotations

from aiohttp import web

from tok_client.types import ErrorBody, ErrorResponse
from tok_core import EngineError, InvalidField
from tok_server.wire import encode

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """A request that cannot be answered: HTTP status and the error object's four members."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The error object as JSON."""
        error = ErrorBody(message=self.message, type=self.kind, param=self.param, code=self.code)
        return encode(ErrorResponse(error=error))

    def response(self) -> web.Response:
        """The whole HTTP response."""
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=self.headers)


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the request says something that is not allowed."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """503: the engine cannot answer now; clients may try again."""
    return ApiError(503, message, kind=SERVER, code=code, headers={"Retry-After": "1"})


def internal(request_id: str) -> ApiError:
    """500: a defect of the server. What happened is in its log, not in the answer."""
    message = f"internal error; the server's log has more under request {request_id}"
    return ApiError(500, message, kind=SERVER, code="internal_error")


def of_exception(error: Exception, request_id: str) -> ApiError:
    """The ApiError that stands for any exception which a handler may end with."""
    match error:
        case ApiError():
            return error
        case InvalidField(field=field):
            return invalid(field, str(error))
        case EngineError():
            return unavailable(str(error), "engine_unavailable")
        case web.HTTPException():
            return _of_http(error)
        case _:
            return internal(request_id)


def _of_http(error: web.HTTPException) -> ApiError:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, error.text or error.reason, code="request_too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"method {error.method} is not allowed here; allowed: {allowed}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
        case web.HTTPNotFound():
            return ApiError(404, "there is nothing at this URL", code="not_found")
        case _:
            return ApiError(error.status, error.text or error.reason)
