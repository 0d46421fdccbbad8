"""The body of every error answer, and of the event that ends a failed stream."""

from __future__ import annotations

from tok_client.types.base import Wire


class ErrorBody(Wire, frozen=True, kw_only=True):
    """An error. `param` names the request field at fault, `code` the kind of error for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Wire, frozen=True, kw_only=True):
    """`{"error": {...}}`."""

    error: ErrorBody
