"""RequestCounts: the id and cost of one HTTP request, for log, rate limit and trace span."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from tok_core import RequestStream
from tok_server.observability.latency import RequestDurations


@dataclass(slots=True)
class RequestCounts:
    """State and cost of one HTTP request so far. Times are those of `time.monotonic`.

    id           identifies the request in the log and to its client
    key          number of the API key it came with; `tok_server.http.auth.NO_KEY`: none was needed
    tenant       the engine's name for the key's owner; "": no owner
    queued       when the engine had received all its prompts
    first_token  when its first token came
    body_bytes   bytes of its body read so far
    failed       status of an error that happened after "200 OK" was sent
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
        return RequestDurations(self.first_token - self.started, seconds_per_token, now - self.started)

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
            first = stream.first_token
            if first is not None:
                self.first_token = first if self.first_token is None else min(first, self.first_token)


COUNTS = web.RequestKey("COUNTS", RequestCounts)
