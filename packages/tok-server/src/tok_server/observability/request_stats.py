"""Cost and durations of requests: counts of each one, and latency percentiles over seconds, minutes and an hour.

Latencies are counted in buckets, each `BUCKET_RATIO` times as wide as the one before. A percentile always lies in the
right bucket. Memory does not grow with the number of requests.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiohttp import web

from tok_core import RequestStream

KINDS = ("queue", "ttft", "token", "e2e")
QUANTILES = (0.5, 0.9, 0.99)

MIN_LATENCY_SECONDS, MAX_LATENCY_SECONDS = 1e-4, 1e4
BUCKET_RATIO = 1.15
BUCKETS = 2 + math.ceil(math.log(MAX_LATENCY_SECONDS / MIN_LATENCY_SECONDS) / math.log(BUCKET_RATIO))
BOUNDS = [
    MIN_LATENCY_SECONDS * BUCKET_RATIO**bucket for bucket in range(BUCKETS - 1)
]  # upper bound, in seconds, of each bucket but the last

RECENT_SECONDS = 10
MINUTES_SECONDS = 120  # seconds of `Latencies.minutes`
HOUR_SLICES = 360  # slices of RECENT_SECONDS: one hour
Counts = npt.NDArray[np.uint32]


class RequestDurations(NamedTuple):
    """Seconds that one request took.

    queue  in the engine's queue, until the first of its prompts began to run; None if unknown
    ttft   to its first token
    token  per token after the first; None without any
    e2e    in total
    """

    queue: float | None
    ttft: float
    token: float | None
    e2e: float


class LatencySummary(NamedTuple):
    """Each kind's `QUANTILES`, in seconds, NaN without requests; and the number of requests that ended."""

    percentiles: list[float]
    ended: int


class Latencies:
    """Histograms of the durations passed to `observe`. Call `tick` once a second."""

    def __init__(self) -> None:
        self._current = _zero_counts()
        self._seconds: deque[Counts] = deque(maxlen=MINUTES_SECONDS)
        self._slices: deque[Counts] = deque(maxlen=HOUR_SLICES)
        self._ticks = 0

    def observe(self, durations: RequestDurations) -> None:
        """Count a request that has ended successfully."""
        for kind, seconds in enumerate(durations):
            if seconds is not None:
                self._current[kind][bisect_left(BOUNDS, seconds)] += 1

    def tick(self) -> None:
        """End the current second; every `RECENT_SECONDS` seconds, add their sum to the hour."""
        self._seconds.append(np.array(self._current, np.uint32))
        self._current = _zero_counts()
        self._ticks += 1
        if self._ticks % RECENT_SECONDS == 0:
            self._slices.append(self._sum_of_last(RECENT_SECONDS))

    def recent(self) -> list[float]:
        """Return each kind's `QUANTILES`, in seconds, of the last `RECENT_SECONDS`; NaN without requests."""
        return _percentiles(self._sum_of_last(RECENT_SECONDS))

    def minutes(self) -> LatencySummary:
        """Summarise the last `MINUTES_SECONDS`."""
        return _summary(_sum(self._seconds))

    def hour(self) -> LatencySummary:
        """Summarise the last hour."""
        return _summary(_sum(self._slices) + self._sum_of_last(self._ticks % RECENT_SECONDS))

    def _sum_of_last(self, seconds: int) -> Counts:
        return _sum(islice(reversed(self._seconds), seconds))


def _zero_counts() -> list[list[int]]:
    """Return zero counts as lists: incrementing an array's element takes longer than all the rest of `observe`."""
    return [[0] * BUCKETS for _ in KINDS]


def _sum(slices: Iterable[Counts]) -> Counts:
    return sum(slices, np.zeros((len(KINDS), BUCKETS), np.uint32))


def _summary(counts: Counts) -> LatencySummary:
    return LatencySummary(_percentiles(counts), int(counts[-1].sum()))


def _percentiles(counts: Counts) -> list[float]:
    return [_percentile(of_kind, quantile) for of_kind in counts for quantile in QUANTILES]


def _percentile(counts: Counts, quantile: float) -> float:
    """Return the percentile, interpolated geometrically within its bucket; NaN if all counts are zero."""
    below = counts.cumsum(dtype=np.int64)
    if below[-1] == 0:
        return math.nan
    rank = quantile * float(below[-1])
    bucket = int(np.searchsorted(below, rank))
    inside = 1 - (float(below[bucket]) - rank) / float(counts[bucket])
    return float(MIN_LATENCY_SECONDS * BUCKET_RATIO ** (bucket - 1 + inside))


class PromptSeconds(NamedTuple):
    """Seconds of one prompt in the engine; None for parts that it did not reach.

    queue      from its submission until its first sample got a slot
    prefill    from then to its first token
    decode     from its first token to the end of its last sample
    per_token  `decode` divided by the tokens after the first of its longest sample
    """

    queue: float | None
    prefill: float | None
    decode: float | None
    per_token: float | None


def prompt_seconds(stream: RequestStream) -> PromptSeconds:
    """Return the times of a stream that has ended."""
    times, longest = stream.timings, max(stream.lengths, default=0)
    started, first = times.started, times.first_token
    queue = None if started is None else max(0.0, started - times.submitted)
    prefill = None if started is None or first is None else max(0.0, first - started)
    decode = None if first is None or times.finished is None else times.finished - first
    return PromptSeconds(queue, prefill, decode, decode / (longest - 1) if decode is not None and longest > 1 else None)


@dataclass(slots=True)
class RequestCounts:
    """State and cost of one HTTP request so far. Times are those of `time.monotonic`.

    id              identifies the request in the log and to its client
    key             number of the API key it came with; `tok_server.http.access.NO_KEY`: none was needed
    tenant          the engine's name for the key's owner; "": no owner
    queued          when the engine had received all its prompts
    first_token     when its first token came
    prompts         times of its prompts that have ended
    prompt_lengths  tokens of each of these prompts
    sample_lengths  output tokens of each of their samples
    body_bytes      bytes of its body read so far
    failed          status of an error that happened after "200 OK" was sent
    """

    id: str
    key: int = -1
    tenant: str = ""
    started: float = field(default_factory=time.monotonic)
    queued: float | None = None
    first_token: float | None = None
    samples: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prompts: list[PromptSeconds] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    sample_lengths: list[int] = field(default_factory=list)
    body_bytes: int = 0
    failed: int | None = None

    def durations(self, now: float) -> RequestDurations | None:
        """Return the durations of a request that ends now; None if it produced no tokens.

        The time per token assumes that all samples have the mean length.
        """
        if self.first_token is None:
            return None
        tokens_after_first = self.output_tokens / self.samples - 1 if self.samples else 0.0
        seconds_per_token = (now - self.first_token) / tokens_after_first if tokens_after_first > 0 else None
        queue = min((one.queue for one in self.prompts if one.queue is not None), default=None)
        return RequestDurations(queue, self.first_token - self.started, seconds_per_token, now - self.started)

    @property
    def tokens(self) -> int:
        """Return the number of prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens

    def submitted(self, streams: Sequence[RequestStream], samples_per_prompt: int) -> None:
        """Record that the engine has received all prompts, with `samples_per_prompt` samples of each."""
        self.queued = time.monotonic()
        self.samples += samples_per_prompt * len(streams)
        self.prompt_tokens += sum(len(stream.prompt_token_ids) for stream in streams)

    def ended(self, streams: Iterable[RequestStream]) -> None:
        """Add the cost of streams that have ended, successfully or not."""
        for stream in streams:
            self.output_tokens += stream.output_tokens
            self.cached_tokens += stream.cached_tokens
            self.prompts.append(prompt_seconds(stream))
            self.prompt_lengths.append(len(stream.prompt_token_ids))
            self.sample_lengths += stream.lengths
            first = stream.first_token
            if first is not None:
                self.first_token = first if self.first_token is None else min(first, self.first_token)


COUNTS = web.RequestKey("COUNTS", RequestCounts)
