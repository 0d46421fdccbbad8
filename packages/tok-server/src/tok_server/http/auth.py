"""Authentication: check the API keys of requests, and the admin key of requests below /admin/.

If API keys are set, every path needs one except /health, /ready and the dashboard's page. /admin/ always needs the
admin key. The page by itself reveals nothing about the server: its data, /dashboard/events, needs a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

from tok_server.wire import ApiError

ADMIN_PREFIX = "/admin/"
NO_KEY = -1
"""Number of the key of a request that needs none."""


def tenant_cache_salt(tenant: str, cache_salt: str | None, *, share_prefixes: bool) -> str | None:
    """Return the engine's cache salt for a request: other keys cannot detect its tokens in the prefix cache.

    cache_salt      the request's own salt, which also separates requests of one key
    share_prefixes  leave the tenant out of the salt
    """
    owner = "" if share_prefixes else tenant
    return None if not owner and cache_salt is None else f"{owner}\0{cache_salt or ''}"


class ApiKeys:
    """The API keys, and the admin key, that clients may send as bearer token."""

    def __init__(self, api_keys: Sequence[str] = (), admin_key: str | None = None) -> None:
        self._api_keys = [key.encode() for key in api_keys]
        self._tenants = [hashlib.sha256(b"tok tenant\0" + key).hexdigest()[:32] for key in self._api_keys]
        self._admin_key = None if admin_key is None else admin_key.encode()
        self._public_paths = {"/health", "/ready"}

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
            raise _unauthorised("the API key is missing or wrong; send it in the header 'Authorization: Bearer KEY'")
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
    sent = credentials.strip().encode(errors="surrogateescape")
    matched = None
    for number, key in enumerate(keys):
        if hmac.compare_digest(sent, key):
            matched = number
    return matched if scheme.lower() == "bearer" else None


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
