"""Origins: which web pages may use the server from a browser (CORS): none, unless allowed.

A browser asks before it sends JSON across origins, but not before it sends a body without a type: what comes from a
page that is not allowed is refused, not only its answer withheld.
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
MAX_AGE = "600"  # seconds for which a browser need not ask again


class Origins:
    """The origins that are allowed, as browsers write them: "https://example.org"."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = frozenset(one.rstrip("/").lower() for one in allowed)

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Raises ApiError (403) for a request by which a page of another origin would change something."""
        origin = headers.get("Origin")
        if origin is None or method in SAFE or self._allows(origin) or _same(origin, headers.get("Host", "")):
            return
        message = f"web pages of {origin[:200]!r} may not use this server; --allow-origin lets them"
        raise ApiError(403, message, code="origin_not_allowed")

    def preflight(self, method: str, headers: Mapping[str, str]) -> web.Response | None:
        """The answer to a browser that asks what a page of an allowed origin may send; None: it is no such question."""
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
        """What lets a page of the origin read an answer."""
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
