"""Decide whether and when to retry: exponential back-off with jitter, never sooner than the server's Retry-After."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tok_client.errors import APIConnectionError, APIStatusError, APITimeoutError, TokError


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays before retries, in seconds.

    The k-th retry waits `first` × 2^(k−1), at most `most`, times a random factor from 1/2 to 1, and at least as long as
    Retry-After says. `clock` returns seconds since 1970, `sleep` waits, `uniform` returns a random number in [0, 1).
    """

    first: float = 0.5
    most: float = 8.0
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[], float] = random.random

    def delay(self, retry: int, error: TokError) -> float:
        """Return the seconds to wait before retry number `retry` (from 1) after `error`."""
        exponential_delay = min(self.most, self.first * 2.0 ** min(retry - 1, 60)) * (1 + self.uniform()) / 2
        retry_after = error.retry_after if isinstance(error, APIStatusError) else None
        return max(exponential_delay, _seconds(retry_after, self.clock()) if retry_after else 0.0)


def may_retry(error: TokError, *, repeatable: bool = True) -> bool:
    """Return whether a retry may succeed: broken connections, and statuses 408, 409, 429 and 500 and above, except 501.

    Timeouts are not retried: the server may still be processing the request, and a second one would double its load. A
    request that is not repeatable is retried only after a refusal: 429 and 503.
    """
    if not repeatable:
        return isinstance(error, APIStatusError) and error.status_code in (429, 503)
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or (error.status_code >= 500 and error.status_code != 501)
    return isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError)


def _seconds(retry_after: str, now: float) -> float:
    """Return the header's seconds, or those until its date; 0 if it is neither (RFC 9110, section 10.2.3)."""
    try:
        seconds = float(retry_after)
    except ValueError:
        from email.utils import parsedate_to_datetime  # rarely needed, slow to import

        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - now
        except ValueError:
            return 0.0
    return seconds if math.isfinite(seconds) else 0.0
