"""Who may ask: with an API key set, everything but /health wants it as bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from tok_server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})


def check(api_key: str | None, path: str, headers: Mapping[str, str]) -> None:
    """Raises ApiError (401) unless `headers` hold the key, or none is needed."""
    if api_key is None or path in OPEN_PATHS:
        return
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    # Compared in constant time: the time taken must not tell how much of a guess was right.
    right = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), api_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise ApiError(
            401,
            "the API key is missing or wrong; send it in the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
