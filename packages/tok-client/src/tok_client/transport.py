"""One HTTP session: sends a request, tries again where that may help, decodes the answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

import msgspec

from tok_client.backoff import Backoff, may_retry
from tok_client.errors import APIResponseError, TokError, status_error
from tok_client.streaming import AsyncStream
from tok_client.translate import translating

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")


class Transport:
    """Requests to the API at `base_url`, with `max_retries` retries as `backoff` spaces them.

    `timeout`: seconds without a sign of the server (connecting, or between bytes received) until
    APITimeoutError. The session belongs to the event loop of the first request. ValueError: an argument is
    not allowed.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float, max_retries: int, backoff: Backoff) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}; allowed: URLs that begin with http:// or https://")
        if max_retries < 0:
            raise ValueError(f"max_retries is {max_retries}; allowed: integers from 0")
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._timeout = _checked(timeout)
        self._max_retries = max_retries
        self._backoff = backoff
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: WeakSet[AsyncStream[object]] = WeakSet()
        self._closed = False

    async def fetch(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: bytes | None = None,
        timeout: float | None = None,
    ) -> T:
        """The answer to one request, whole, decoded as `kind`."""

        seconds = self._timeout if timeout is None else _checked(timeout)

        async def once() -> T:
            response = await self._open(method, path, body, seconds)
            with translating(response.url):
                content = await response.read()
            return _decoded(content, kind)

        return await self._retrying(once, seconds)

    async def stream(self, path: str, kind: type[T], *, body: bytes, timeout: float | None = None) -> AsyncStream[T]:
        """The answer to one request as a stream of `kind`; once it has begun there is no retry."""

        seconds = self._timeout if timeout is None else _checked(timeout)

        async def once() -> AsyncStream[T]:
            response = await self._open("POST", path, body, seconds)
            if response.content_type == "text/event-stream":
                opened = AsyncStream(response, kind)
                self._streams.add(opened)
                return opened
            with translating(response.url):
                content = await response.read()
            message = f"asked for a stream, got {response.content_type}: {content[:200]!r}"
            raise APIResponseError(message, body=content)

        return await self._retrying(once, seconds)

    async def close(self) -> None:
        """Closes all connections, those of open streams too. May be called again."""
        self._closed = True
        for stream in list(self._streams):
            stream.break_off("the client was closed")
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _retrying(self, once: Callable[[], Awaitable[T]], timeout: float) -> T:
        for retry in count(1):
            try:
                return await once()
            except TokError as error:
                if retry > self._max_retries or not may_retry(error):
                    raise
                delay = self._backoff.delay(retry, error)
                if delay > timeout:  # asked to stay away for longer than the caller would wait
                    raise
            await self._backoff.sleep(delay)
        raise AssertionError("unreachable")

    async def _open(self, method: str, path: str, body: bytes | None, timeout: float) -> aiohttp.ClientResponse:
        """The response, its body still to be read, unless its status is an error."""
        import aiohttp
        from yarl import URL

        limits = aiohttp.ClientTimeout(total=None, connect=timeout, sock_read=timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        url = URL(self._base_url + path, encoded=True)
        with translating(url):
            response = await self._opened().request(
                method, url, data=body, headers=headers, timeout=limits, allow_redirects=False
            )
            if response.status < 300:
                return response
            content = await response.read()
        raise status_error(response.status, response.headers, content)

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._session, self._loop = _session(self._api_key), loop
        if self._loop is not loop:
            raise RuntimeError("the client belongs to another event loop; make one in each")
        return self._session


def _session(api_key: str | None) -> aiohttp.ClientSession:
    from importlib.metadata import version

    import aiohttp

    headers = {"User-Agent": f"tok-client/{version('tok-client')}"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    # No limit on connections: how many requests are open is the caller's choice and the server's.
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar())


def _checked(timeout: float) -> float:
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; allowed: seconds above 0, finite")
    return timeout


def _decoded(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        message = f"the answer is no {kind.__name__}: {error}; it begins {content[:200]!r}"
        raise APIResponseError(message, body=content) from error
