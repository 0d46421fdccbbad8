"""Exceptions that calls raise.

TokError
├── APIConnectionError                 no connection, or it broke
│   └── APITimeoutError (TimeoutError)     no response from the server for `timeout` seconds
├── APIStatusError                     the server answered with an error status
│   ├── BadRequestError           400
│   ├── AuthenticationError       401
│   ├── PermissionDeniedError     403
│   ├── NotFoundError             404
│   ├── RequestTooLargeError      413
│   ├── UnprocessableEntityError  422
│   ├── RateLimitError            429
│   └── InternalServerError       500 and above
├── APIResponseError                   an answer that does not follow the API
└── StreamError                        the server reported an error within a stream
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec


class TokError(Exception):
    """Base of all errors of this package. All of them can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class APIConnectionError(TokError):
    """There was no connection, or it broke before the answer was complete."""


class APITimeoutError(APIConnectionError, TimeoutError):
    """The server sent nothing for `timeout` seconds. It may still be processing the request."""


class APIStatusError(TokError):
    """The server answered with an error status.

    status_code        the HTTP status
    body               body of the answer: decoded JSON, else text
    type, param, code  members of OpenAI's error object, if there is one; `param` names the field at fault
    request_id         the header x-request-id
    retry_after        the header Retry-After, as sent
    """

    def __init__(
        self,
        message: str,
        *,
        status_code: int,
        body: object = None,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        retry_after: str | None = None,
    ) -> None:
        super().__init__(f"{status_code}: {message}")
        self.status_code = status_code
        self.body = body
        self.type = type
        self.param = param
        self.code = code
        self.request_id = request_id
        self.retry_after = retry_after


class BadRequestError(APIStatusError):
    """400: the request has a field that is not allowed; see `param`."""


class AuthenticationError(APIStatusError):
    """401: the API key is missing or wrong."""


class PermissionDeniedError(APIStatusError):
    """403: the API key does not allow this."""


class NotFoundError(APIStatusError):
    """404: no such model or path."""


class RequestTooLargeError(APIStatusError):
    """413: the body is larger than the server accepts."""


class UnprocessableEntityError(APIStatusError):
    """422: the server could parse the request but not process it."""


class RateLimitError(APIStatusError):
    """429: too many requests; retries did not help."""


class InternalServerError(APIStatusError):
    """500 and above: the server failed; retries did not help."""


class APIResponseError(TokError):
    """The server's answer does not follow the API. `body` is the part at fault."""

    def __init__(self, message: str, *, body: bytes = b"") -> None:
        super().__init__(message)
        self.body = body


class StreamError(TokError):
    """The server reported an error within a stream; the chunks before it are valid."""

    def __init__(
        self, message: str, *, type: str | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.type = type
        self.param = param
        self.code = code


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    413: RequestTooLargeError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error(status: int, headers: Mapping[str, str], content: bytes) -> APIStatusError:
    """Return the exception for an answer with an error status, whatever the form of its body."""
    kind = InternalServerError if status >= 500 else _BY_STATUS.get(status, APIStatusError)
    body = _loads(content)
    details = _error_details(body)
    message = details.message or (body if isinstance(body, str) and body else "no message")
    if 300 <= status < 400:
        message = f"redirected to {headers.get('Location', 'nowhere')}; set base_url to the API's own URL"
    return kind(
        message[:2000],
        status_code=status,
        body=body,
        type=details.type,
        param=details.param,
        code=details.code,
        request_id=headers.get("x-request-id"),
        retry_after=headers.get("Retry-After"),
    )


def event_error(data: bytes) -> TokError:
    """Return the exception for a stream event that is not a chunk.

    An error object gives StreamError, anything else APIResponseError.
    """
    details = _error_details(_loads(data))
    if details.message is None:
        return APIResponseError(f"the stream has an event that is not a chunk: {data[:200]!r}", body=data)
    return StreamError(details.message, type=details.type, param=details.param, code=details.code)


@contextmanager
def translate_errors(url: object) -> Iterator[None]:
    """Raise APITimeoutError or APIConnectionError in place of exceptions of the HTTP library and the system."""
    import aiohttp

    try:
        yield
    except TimeoutError as error:
        raise APITimeoutError(f"no response from {url} in time: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise APIConnectionError(f"no complete answer from {url}: {error or type(error).__name__}") from error


DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding: invalid JSON, another type than expected, invalid UTF-8, or too deep nesting."""


@dataclass(frozen=True, slots=True)
class _ErrorDetails:
    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | None = None


def _loads(content: bytes) -> object:
    try:
        return msgspec.json.decode(content)
    except DECODE_ERRORS:
        return content.decode("utf-8", "replace")


def _error_details(body: object) -> _ErrorDetails:
    """Return the message and details of an error body.

    Servers differ: an object or a text under "error", or "message", "detail" at the top level.
    """
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, str):
        return _ErrorDetails(message=error)
    if not isinstance(error, dict):
        return _ErrorDetails()
    message = error.get("message", error.get("detail"))
    return _ErrorDetails(_text(message), _text(error.get("type")), _text(error.get("param")), _text(error.get("code")))


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
