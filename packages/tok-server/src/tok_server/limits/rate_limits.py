"""RateLimits: requests and tokens per minute for each API key, as token buckets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tok_server.wire import ApiError, limited

MINUTE = 60.0


class TokenBucket:
    """A minute's budget that refills continuously. Spending beyond it leaves a debt, which must refill first."""

    def __init__(self, a_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.a_minute = a_minute
        self._clock = clock
        self._left = float(a_minute)
        self._at = clock()

    @property
    def left(self) -> float:
        """Return the amount that can be spent now; below 0: a debt."""
        now = self._clock()
        self._left = min(self._left + max(0.0, now - self._at) * self.a_minute / MINUTE, self.a_minute)
        self._at = now
        return self._left

    def spend(self, amount: float) -> None:
        """Subtract `amount`, even if less is left."""
        self._left = self.left - amount

    def wait(self, amount: float) -> float:
        """Return the seconds until `amount`, at most a minute's budget, can be spent."""
        return max(0.0, (min(amount, self.a_minute) - self.left) * MINUTE / self.a_minute)


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
                raise _too_many(name, bucket, seconds)
        if (bucket := self._bucket("requests", key)) is not None:
            bucket.spend(1)

    def charge(self, key: int, tokens: int) -> None:
        """Count tokens of a key."""
        if (bucket := self._bucket("tokens", key)) is not None:
            bucket.spend(tokens)

    def headers(self, key: int) -> dict[str, str]:
        """Return the key's limits and remaining budget as headers in OpenAI's format; empty if nothing is limited."""
        found = {}
        for name in self._limits:
            if (bucket := self._bucket(name, key)) is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.a_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.left)))
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.wait(bucket.a_minute):.3f}s"
        return found

    def _bucket(self, name: str, key: int) -> TokenBucket | None:
        limit = self._limits.get(name)
        if limit is None:
            return None
        found = self._buckets.get((name, key))
        if found is None:
            found = self._buckets[name, key] = TokenBucket(limit, self._clock)
        return found


def _too_many(name: str, bucket: TokenBucket, seconds: float) -> ApiError:
    message = f"this key has had its {bucket.a_minute} {name} a minute; try again in {seconds:.1f} seconds"
    return limited(f"rate_limit_{name}", 429, message, kind=name, code="rate_limit_exceeded", retry_after=seconds)
