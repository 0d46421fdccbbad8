"""Origins: which web pages may use the server from a browser (CORS); none by default.

A browser sends a preflight before JSON across origins, but not before a body without a content type. Requests from
pages that are not allowed are therefore refused; withholding the response would not be enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from aiohttp import web

from tok_server.wire import ApiError

ALL = "*"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
EXPOSED = (
    "x-request-id, x-tok-ignored, retry-after, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
MAX_AGE = "600"  # seconds for which a browser may cache a preflight's response


class Origins:
    """The allowed origins, as browsers write them: "https://example.org"."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = frozenset(one.rstrip("/").lower() for one in allowed)

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise ApiError (403) for a request by which a page of a forbidden origin could change something."""
        origin = headers.get("Origin")
        if origin is None or method in SAFE or self._allows(origin) or _same(origin, headers.get("Host", "")):
            return
        message = f"web pages of {origin[:200]!r} may not use this server; --allow-origin lets them"
        raise ApiError(403, message, code="origin_not_allowed")

    def preflight(self, method: str, headers: Mapping[str, str]) -> web.Response | None:
        """Return the response to a CORS preflight from an allowed origin; None for any other request."""
        origin, wanted = headers.get("Origin"), headers.get("Access-Control-Request-Method")
        if method != "OPTIONS" or origin is None or wanted is None or not self._allows(origin):
            return None
        answer = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": MAX_AGE,
        }
        return web.Response(status=204, headers=answer)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers that let a page of `origin` read a response."""
        if origin is None or not self._allows(origin):
            return {"Vary": "Origin"} if self._allowed else {}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED, "Vary": "Origin"}

    def _allows(self, origin: str) -> bool:
        return ALL in self._allowed or origin.lower() in self._allowed


def _same(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False
