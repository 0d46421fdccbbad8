"""Who may ask: with API keys set, all but /health, /ready and the dashboard's page wants one; /admin/ always its own.

The page by itself tells nothing of the server: what it shows, /dashboard/events, wants a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

from tok_server.wire import ApiError

ADMIN = "/admin/"
ANYONE = -1
"""The number of the key that is needed where none is."""


def salted(tenant: str, cache_salt: str | None, *, share_prefixes: bool) -> str | None:
    """Return the engine's salt for a request: other keys cannot tell from its cached tokens what it has sent.

    cache_salt      the request's own, which separates requests of one key, too
    share_prefixes  the tenant does not matter
    """
    owner = "" if share_prefixes else tenant
    return None if not owner and cache_salt is None else f"{owner}\0{cache_salt or ''}"


class ApiKeys:
    """The keys that clients may send as bearer token."""

    def __init__(self, api_keys: Sequence[str] = (), admin_key: str | None = None) -> None:
        self._api_keys = [key.encode() for key in api_keys]
        self._tenants = [hashlib.sha256(b"tok tenant\0" + key).hexdigest()[:32] for key in self._api_keys]
        self._admin_key = None if admin_key is None else admin_key.encode()
        self._open_paths = {"/health", "/ready"}

    def open_paths(self, paths: Iterable[str]) -> None:
        """Answer these paths without a key."""
        self._open_paths.update(paths)

    def check(self, path: str, headers: Mapping[str, str]) -> int:
        """The number of the API key in `headers`, `ANYONE` if none is needed. Errors: ApiError 401, 403."""
        if path.startswith(ADMIN):
            return self._check_admin(headers)
        if not self._api_keys or path in self._open_paths:
            return ANYONE
        number = _find(self._api_keys, headers)
        if number is None:
            raise _unauthorised("the API key is missing or wrong; send it in the header 'Authorization: Bearer KEY'")
        return number

    def tenant(self, number: int) -> str:
        """Return the name by which the engine, caches and files know a key's owner: a hash, the same after a restart.

        number  as `check` returned it; "" for `ANYONE`
        """
        return "" if number == ANYONE else self._tenants[number]

    def _check_admin(self, headers: Mapping[str, str]) -> int:
        if self._admin_key is None:
            raise ApiError(403, "nothing under /admin/ is served without --admin-key", code="no_admin_key")
        if _find([self._admin_key], headers) is None:
            raise _unauthorised("this needs the admin key, in the header 'Authorization: Bearer KEY'")
        return ANYONE


def _find(keys: Sequence[bytes], headers: Mapping[str, str]) -> int | None:
    """Which of the keys was sent. Takes as long for each: the time must not tell how much of a guess was right."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    sent = given.strip().encode(errors="surrogateescape")
    found = None
    for number, key in enumerate(keys):
        if hmac.compare_digest(sent, key):
            found = number
    return found if scheme.lower() == "bearer" else None


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
