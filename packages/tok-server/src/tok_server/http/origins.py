"""Origins: which web pages may use the server from a browser (CORS); none by default.

A browser sends a preflight before JSON across origins, but not before a body without a content type. Requests from
pages that are not allowed are therefore refused; withholding the response would not be enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from aiohttp import web

from tok_server.wire import ApiError

ANY_ORIGIN = "*"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
EXPOSED_HEADERS = (
    "x-request-id, x-tok-ignored, retry-after, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
PREFLIGHT_MAX_AGE = "600"  # seconds for which a browser may cache a preflight's response


class Origins:
    """The allowed origins, as browsers write them: "https://example.org"."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = frozenset(one.rstrip("/").lower() for one in allowed)

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise ApiError (403) for a request by which a page of a forbidden origin could change something."""
        origin = headers.get("Origin")
        if (
            origin is None
            or method in SAFE_METHODS
            or self._allows(origin)
            or _is_same_origin(origin, headers.get("Host", ""))
        ):
            return
        message = f"web pages of {origin[:200]!r} may not use this server; allow them with --allow-origin"
        raise ApiError(403, message, code="origin_not_allowed")

    def preflight(self, method: str, headers: Mapping[str, str]) -> web.Response | None:
        """Return the response to a CORS preflight from an allowed origin; None for any other request."""
        origin, requested_method = headers.get("Origin"), headers.get("Access-Control-Request-Method")
        if method != "OPTIONS" or origin is None or requested_method is None or not self._allows(origin):
            return None
        response_headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": PREFLIGHT_MAX_AGE,
        }
        return web.Response(status=204, headers=response_headers)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers that let a page of `origin` read a response."""
        if origin is None or not self._allows(origin):
            return {"Vary": "Origin"} if self._allowed else {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED_HEADERS,
            "Vary": "Origin",
        }

    def _allows(self, origin: str) -> bool:
        return ANY_ORIGIN in self._allowed or origin.lower() in self._allowed


def _is_same_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False
