"""Translate the HTTP library's exceptions into this package's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tok_client.errors import APIConnectionError, APITimeoutError


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
