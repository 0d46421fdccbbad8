"""Limits on requests: time until the answer, unread bytes, requests and tokens per minute, requests per loop turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from tok_core import RequestStream
from tok_server.wire import ApiError, limited

MINUTE = 60.0
MAX_REQUESTS_PER_TURN = 16  # each takes about 0.2 ms. Fewer would reach the engine in smaller groups, at a higher cost


@asynccontextmanager
async def deadline(started: float, seconds: float) -> AsyncIterator[None]:
    """Limit the block's time to `seconds` after `started`, by `time.monotonic`. Errors: ApiError (504)."""
    timeout = asyncio.timeout(max(0.0, started + seconds - time.monotonic()))
    try:
        async with timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        message = f"the request was not answered within {seconds:g} seconds"
        raise limited("request_timeout", 504, message) from error


class UnreadLimit:
    """Limit of the bytes that a client leaves unread of its streams; a context manager. The error is ApiError (408).

    The task is cancelled only while it waits for the client to read. While it is busy otherwise, the client is not at
    fault; tokens that arrive meanwhile are written together.

    sending  the task is writing: it waits for the client to read, or is about to
    """

    def __init__(self, streams: Sequence[RequestStream], max_bytes: int) -> None:
        self.sending = False
        self._max_bytes = max_bytes
        for stream in streams:  # the other half is for deltas already read and being written
            stream.bound(max_bytes // (2 * len(streams)), self._on_overflow)

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancel_requests = task.cancelling()  # cancellation requests by others
        self._expired = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sending = False
        # If others have cancelled the task, too, the cancellation propagates instead.
        if self._expired and self._task.uncancel() <= self._cancel_requests and kind is asyncio.CancelledError:
            message = f"the client has left more than {self._max_bytes} bytes of its stream unread"
            raise limited("max_unread", 408, message, code="unread_stream") from error

    def _on_overflow(self) -> None:
        if self.sending and not self._expired:
            self._expired = True
            self._task.cancel()


class TokenBucket:
    """A minute's budget that refills continuously. Spending beyond it leaves a debt, which must refill first."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._remaining = float(per_minute)
        self._updated_at = clock()

    @property
    def remaining(self) -> float:
        """Return the amount that can be spent now; below 0: a debt."""
        now = self._clock()
        self._remaining = min(
            self._remaining + max(0.0, now - self._updated_at) * self.per_minute / MINUTE, self.per_minute
        )
        self._updated_at = now
        return self._remaining

    def spend(self, amount: float) -> None:
        """Subtract `amount`, even if less is left."""
        self._remaining = self.remaining - amount

    def wait(self, amount: float) -> float:
        """Return the seconds until `amount`, at most a minute's budget, can be spent."""
        return max(0.0, (min(amount, self.per_minute) - self.remaining) * MINUTE / self.per_minute)


class RateLimits:
    """Token buckets of all API keys; without API keys, all clients share one."""

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        limits = {"requests": requests, "tokens": tokens}
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}
        self._clock = clock
        self._buckets: dict[tuple[str, int], TokenBucket] = {}

    def __bool__(self) -> bool:
        """Return whether any limit is set."""
        return bool(self._limits)

    def admit(self, key: int) -> None:
        """Count a request of a key. Errors: ApiError 429 if its requests or tokens are used up."""
        for name in ("tokens", "requests"):
            bucket = self._bucket(name, key)
            if bucket is not None and (seconds := bucket.wait(1)) > 0:
                raise _rate_limit_error(name, bucket, seconds)
        if (bucket := self._bucket("requests", key)) is not None:
            bucket.spend(1)

    def charge(self, key: int, tokens: int) -> None:
        """Count tokens of a key."""
        if (bucket := self._bucket("tokens", key)) is not None:
            bucket.spend(tokens)

    def headers(self, key: int) -> dict[str, str]:
        """Return the key's limits and remaining budget as headers in OpenAI's format; empty if nothing is limited."""
        headers = {}
        for name in self._limits:
            if (bucket := self._bucket(name, key)) is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.remaining)))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait(bucket.per_minute):.3f}s"
        return headers

    def _bucket(self, name: str, key: int) -> TokenBucket | None:
        limit = self._limits.get(name)
        if limit is None:
            return None
        bucket = self._buckets.get((name, key))
        if bucket is None:
            bucket = self._buckets[name, key] = TokenBucket(limit, self._clock)
        return bucket


def _rate_limit_error(name: str, bucket: TokenBucket, seconds: float) -> ApiError:
    message = f"the rate limit of {bucket.per_minute} {name} per minute is reached; try again in {seconds:.1f} seconds"
    return limited(f"rate_limit_{name}", 429, message, kind=name, code="rate_limit_exceeded", retry_after=seconds)


class LoopThrottle:
    """Admission limit of one event loop: requests beyond `max_requests` wait for the next turn, in order of arrival."""

    def __init__(self, max_requests: int = MAX_REQUESTS_PER_TURN) -> None:
        self._max_requests = self._remaining = max_requests
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def admit(self) -> None:
        """Wait until the request may begin."""
        if self._remaining == self._max_requests:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._remaining:
            self._remaining -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin_turn(self) -> None:
        """Begin a new turn of the loop: admit the requests that have waited longest."""
        self._remaining = self._max_requests
        while self._waiting and self._remaining:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._remaining -= 1
        if self._remaining < self._max_requests:
            asyncio.get_running_loop().call_soon(self._begin_turn)
