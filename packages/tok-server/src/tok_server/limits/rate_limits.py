"""RateLimits: requests and tokens per minute for each API key, as token buckets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tok_server.wire import ApiError, limited

MINUTE = 60.0


class TokenBucket:
    """A minute's budget that refills continuously. Spending beyond it leaves a debt, which must refill first."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
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
        headers = self._buckets.get((name, key))
        if headers is None:
            headers = self._buckets[name, key] = TokenBucket(limit, self._clock)
        return headers


def _rate_limit_error(name: str, bucket: TokenBucket, seconds: float) -> ApiError:
    message = f"the rate limit of {bucket.per_minute} {name} per minute is reached; try again in {seconds:.1f} seconds"
    return limited(f"rate_limit_{name}", 429, message, kind=name, code="rate_limit_exceeded", retry_after=seconds)
