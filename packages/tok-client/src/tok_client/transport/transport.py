"""One HTTP session: send requests, retry them, decode the answers."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from io import BytesIO
from itertools import count
from os import PathLike
from typing import IO, TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

from tok_client.decoders import decoder
from tok_client.errors import DECODE_ERRORS, APIResponseError, TokError, status_error, translate_errors
from tok_client.transport.backoff import Backoff, may_retry
from tok_client.transport.call import Call
from tok_client.transport.loop_thread import LoopThread
from tok_client.transport.streaming import AsyncStream, Stream, decoded

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
U = TypeVar("U")

_PIECE_BYTES = 1 << 20


class Transport:
    """Requests to the API at `base_url`, with up to `max_retries` retries at the delays of `backoff`.

    `timeout` is in seconds without any response from the server (while connecting, or between bytes received) until
    APITimeoutError. The session belongs to the event loop of the first request. ValueError: an argument is not allowed.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float, max_retries: int, backoff: Backoff) -> None:
        if not _is_api_url(base_url):
            allowed = "URLs that begin with http:// or https://, with a host and without query, fragment and spaces"
            raise ValueError(f"base_url is {base_url!r}; allowed: {allowed}")
        if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key is '***'; allowed: a text of printable ASCII")
        if not isinstance(max_retries, int) or max_retries < 0:
            raise ValueError(f"max_retries is {max_retries!r}; allowed: integers from 0")
        if not isinstance(backoff, Backoff):
            raise ValueError(f"backoff is {backoff!r}; allowed: a Backoff")
        url = base_url.rstrip("/")
        # A URL without a path is that of a server, whose API is below /v1.
        self._base_url = url if urlsplit(url).path else f"{url}/v1"
        self._root = self._base_url.removesuffix("/v1")
        self._api_key = api_key
        self._timeout = check_timeout(timeout)
        self._max_retries = max_retries
        self._backoff = backoff
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: WeakSet[AsyncStream[object]] = WeakSet()
        self._closed = False

    async def fetch(self, call: Call[T], timeout: float | None = None, max_retries: int | None = None) -> T:
        """Return the whole answer to one call. `max_retries` replaces the client's."""
        seconds = self._timeout if timeout is None else check_timeout(timeout)

        async def attempt() -> T:
            response = await self._open(call, seconds)
            with translate_errors(response.url):
                content = await response.read()
            return _answer(call, response, content)

        return await self._with_retries(call, attempt, seconds, max_retries)

    async def stream(self, call: Call[T], timeout: float | None = None) -> AsyncStream[T]:
        """Return the answer to one call as a stream; once it has begun there is no retry."""
        seconds = self._timeout if timeout is None else check_timeout(timeout)

        async def attempt() -> AsyncStream[T]:
            response = await self._open(call, seconds)
            if response.content_type == "text/event-stream":
                opened = AsyncStream(response, call)
                self._streams.add(opened)
                return opened
            with translate_errors(response.url):
                content = await response.read()
            message = f"expected a stream, received {response.content_type}: {content[:200]!r}"
            raise APIResponseError(message, body=content)

        return await self._with_retries(call, attempt, seconds)

    async def save(self, call: Call[bytes], path: str | PathLike[str], timeout: float | None = None) -> int:
        """Write the answer to the file `path`, which appears once it is complete. Returns its size in bytes."""
        seconds = self._timeout if timeout is None else check_timeout(timeout)

        async def attempt() -> int:
            response = await self._open(call, seconds)
            try:
                return await _write_whole(path, _pieces(response))
            finally:
                response.close()  # in case the file could not be written; a no-op after a whole body

        return await self._with_retries(call, attempt, seconds)

    async def close(self) -> None:
        """Close all connections, including those of open streams. Idempotent."""
        self._closed = True
        for stream in list(self._streams):
            stream.break_off("the client was closed")
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _with_retries(
        self, call: Call[T], attempt: Callable[[], Awaitable[U]], timeout: float, max_retries: int | None = None
    ) -> U:
        retry_limit = self._max_retries if max_retries is None else max_retries
        for retry in count(1):
            try:
                return await attempt()
            except TokError as error:
                if retry > retry_limit or not may_retry(error, repeatable=call.repeatable):
                    raise
                delay = self._backoff.delay(retry, error)
                if delay > timeout:  # the server asks for a longer wait than the caller allows
                    raise
            await self._backoff.sleep(delay)
        raise AssertionError("unreachable")

    async def _open(self, call: Call[T], timeout: float) -> aiohttp.ClientResponse:
        """Send the request once. Returns the response with its body unread.

        Raises for an error status, unless the call allows it in `accepted_statuses`.
        """
        import aiohttp
        from yarl import URL

        limits = aiohttp.ClientTimeout(total=None, connect=timeout, sock_read=timeout)
        headers = {"Content-Type": "application/json"} if call.body is not None else {}
        url = URL((self._root if call.at_root else self._base_url) + call.path, encoded=True)
        data = _chunked_body(call.body) if call.form is None else call.form()
        with translate_errors(url):
            response = await self._get_session().request(
                call.method, url, data=data, headers=headers, timeout=limits, allow_redirects=False
            )
            if response.status < 300 or response.status in call.accepted_statuses:
                return response
            content = await response.read()
        raise status_error(response.status, response.headers, content)

    def _get_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._session, self._loop = _session(self._api_key), loop
        if self._loop is not loop:
            raise RuntimeError("the client belongs to another event loop; create one client per event loop")
        return self._session


class BlockingTransport:
    """A blocking view of `transport`, whose calls run on `thread`."""

    def __init__(self, transport: Transport, thread: LoopThread) -> None:
        self.transport = transport
        self.thread = thread

    def fetch(self, call: Call[T], timeout: float | None = None) -> T:
        """Fetch as `Transport.fetch`."""
        return self.thread.call(lambda: self.transport.fetch(call, timeout))

    def stream(self, call: Call[T], timeout: float | None = None) -> Stream[T]:
        """Stream as `Transport.stream`."""
        return Stream(self.thread.call(lambda: self.transport.stream(call, timeout)), self.thread)

    def save(self, call: Call[bytes], path: str | PathLike[str], timeout: float | None = None) -> int:
        """Save as `Transport.save`."""
        return self.thread.call(lambda: self.transport.save(call, path, timeout))


def _session(api_key: str | None) -> aiohttp.ClientSession:
    from importlib.metadata import version

    import aiohttp

    headers = {"User-Agent": f"tok-client/{version('tok-client')}"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    # No limit on connections: the caller and the server decide how many requests are open.
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar())


def _is_api_url(url: str) -> bool:
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError: it is no port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "?" not in url and "#" not in url


def check_timeout(timeout: float) -> float:
    """Return `timeout`. ValueError: it is not allowed."""
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}; allowed: seconds above 0, finite")
    return timeout


def _chunked_body(body: bytes | None) -> bytes | BytesIO | None:
    """Return a large body as a file object, which aiohttp writes piece by piece."""
    return BytesIO(body) if body is not None and len(body) > _PIECE_BYTES else body


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    with translate_errors(response.url):
        async for piece in response.content.iter_chunked(_PIECE_BYTES):
            yield piece


async def _write_whole(path: str | PathLike[str], pieces: AsyncIterator[bytes]) -> int:
    """Write `pieces` to a temporary file and rename it to `path`, replacing an old file. Returns the size in bytes.

    OSError: the file cannot be written.
    """
    temporary = f"{os.fspath(path)}.part"
    size = 0
    try:
        with open(temporary, "wb") as file:
            async for piece in pieces:
                size += await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(_flush_to_disk, file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return size


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _answer(call: Call[T], response: aiohttp.ClientResponse, content: bytes) -> T:
    failed = response.status >= 300
    if call.default is not None and not content and not failed:
        return call.default
    try:
        return _decoded(content, call)
    except APIResponseError:
        if not failed:
            raise
    raise status_error(response.status, response.headers, content)


def _decoded(content: bytes, call: Call[T]) -> T:
    kind = call.kind
    if issubclass(kind, bytes):
        return kind(content)
    if issubclass(kind, str):
        return kind(content, "utf-8", "replace")
    try:
        return decoded(content, decoder(kind), call.lenient)
    except DECODE_ERRORS as error:
        message = f"the answer is not a {kind.__name__}: {error}; it begins with {content[:200]!r}"
        raise APIResponseError(message, body=content) from error
