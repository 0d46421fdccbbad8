"""Check who may use the server: clients with an API key, under the server's own host names, from allowed web pages.

If API keys are set, every path needs one except /health, /ping, /ready and the dashboard's page. /admin/ always needs
the admin key. The page by itself reveals nothing about the server: its data, /dashboard/events, needs a key.

A web page can make its own name resolve to 127.0.0.1 (DNS rebinding). The browser then takes this server's answers for
the page's own origin. Requests for other names than the server's own are therefore refused.

A browser sends a CORS preflight before JSON across origins, but not before a body without a content type. Requests from
pages that are not allowed are therefore refused; withholding the response would not be enough.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from tok_server.wire import ApiError

ADMIN_PREFIX = "/admin/"
KEY_HEADERS = ("x-api-key", "api-key")  # of the clients of Anthropic and Azure, instead of a bearer token
NO_KEY = -1
"""Number of the key of a request that needs none."""

ANY_HOST = "*"
MAX_CACHED_HOSTS = 256  # `Host` values that are remembered

ANY_ORIGIN = "*"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
EXPOSED_HEADERS = (
    "x-request-id, request-id, x-tok-ignored, retry-after, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
PREFLIGHT_MAX_AGE = "600"  # seconds for which a browser may cache a preflight's response


def tenant_cache_salt(tenant: str, cache_salt: str | None, *, share_prefixes: bool) -> str | None:
    """Return the engine's cache salt for a request: other keys cannot detect its tokens in the prefix cache.

    cache_salt      the request's own salt, which also separates requests of one key
    share_prefixes  leave the tenant out of the salt
    """
    owner = "" if share_prefixes else tenant
    return None if not owner and cache_salt is None else f"{owner}\0{cache_salt or ''}"


class ApiKeys:
    """The API keys, and the admin key, that clients may send as bearer token or in one of KEY_HEADERS."""

    def __init__(self, api_keys: Sequence[str] = (), admin_key: str | None = None) -> None:
        self._api_keys = [key.encode() for key in api_keys]
        self._tenants = [hashlib.sha256(b"tok tenant\0" + key).hexdigest()[:32] for key in self._api_keys]
        self._admin_key = None if admin_key is None else admin_key.encode()
        self._public_paths = {"/health", "/ping", "/ready"}

    def add_public_paths(self, paths: Iterable[str]) -> None:
        """Serve these paths without a key."""
        self._public_paths.update(paths)

    def check(self, path: str, headers: Mapping[str, str]) -> int:
        """Return the number of the API key in `headers`, `NO_KEY` if none is needed. Errors: ApiError 401, 403."""
        if path.startswith(ADMIN_PREFIX):
            return self._check_admin(headers)
        if not self._api_keys or path in self._public_paths:
            return NO_KEY
        number = _find_key(self._api_keys, headers)
        if number is None:
            header = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise _unauthorised(f"the API key is missing or wrong; send it in the header {header}")
        return number

    def tenant(self, number: int) -> str:
        """Return the name of a key's owner for the engine, caches and files: a hash that a restart does not change.

        number  as `check` returned it; `NO_KEY` has the name ""
        """
        return "" if number == NO_KEY else self._tenants[number]

    def _check_admin(self, headers: Mapping[str, str]) -> int:
        if self._admin_key is None:
            raise ApiError(403, "/admin/ is served only with --admin-key", code="no_admin_key")
        if _find_key([self._admin_key], headers) is None:
            raise _unauthorised("the admin key is missing or wrong; send it in the header 'Authorization: Bearer KEY'")
        return NO_KEY


def _find_key(keys: Sequence[bytes], headers: Mapping[str, str]) -> int | None:
    """Return the number of the key that was sent. Comparing takes constant time, against timing attacks."""
    scheme, _, credentials = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        credentials = next((headers[name] for name in KEY_HEADERS if name in headers), "")
    sent = credentials.strip().encode(errors="surrogateescape")
    matched = None
    for number, key in enumerate(keys):
        if hmac.compare_digest(sent, key):
            matched = number
    return matched


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class AllowedHosts:
    """Host names under which clients may address a server that listens on `host`.

    allowed  names besides localhost and IP addresses; "*": any. If empty, a server on a loopback address accepts no
             other name, a server on any other address every name
    """

    def __init__(self, host: str, allowed: Sequence[str]) -> None:
        self._names = frozenset(_hostname(one) for one in (*allowed, "localhost", host))
        self._restricted = ANY_HOST not in allowed and (bool(allowed) or _is_loopback(_hostname(host)))
        self._check_every_address = bool(allowed)  # else only connections to a loopback address are checked
        self._accepted: set[str] = set()  # `Host` values that are allowed

    def check(self, request: web.BaseRequest) -> None:
        """Raise ApiError (403) for a request whose `Host` is not a name of the server."""
        host = request.headers.get("Host", "")
        if not self._restricted or host in self._accepted:
            return
        name = _hostname(host)
        if name and name not in self._names and not name.endswith(".localhost") and not _is_address(name):
            if self._check_every_address or _arrives_at_loopback(request):
                message = f"Host is {host[:200]!r}; allowed: this server's names and those added with --allowed-host"
                raise ApiError(403, message, param="Host", code="host_not_allowed")
        elif len(self._accepted) < MAX_CACHED_HOSTS:
            self._accepted.add(host)


def _hostname(host: str) -> str:
    """Return the host without its port: "[::1]:80" is "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.rstrip(".").lower()


def _is_address(name: str) -> bool:
    # Rebinding needs a name: a page loaded from an address comes from the host with that address.
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ip_address(name).is_loopback)


def _arrives_at_loopback(request: web.BaseRequest) -> bool:
    own = None if request.transport is None else request.transport.get_extra_info("sockname")
    return not isinstance(own, tuple) or _is_loopback(str(own[0]))


class Origins:
    """The allowed origins, as browsers write them: "https://example.org"."""

    def __init__(self, allowed: Sequence[str]) -> None:
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
