"""RequestCounts: the id and cost of one HTTP request, for log, rate limit and trace span."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from tok_core import RequestStream
from tok_server.observability.latency import Took


@dataclass(slots=True)
class RequestCounts:
    """What is known of one HTTP request so far. Times are those of `time.monotonic`.

    id            tells it apart from others, in the log and to its client
    key           number of the API key that it came with; `auth.ANYONE`: none was needed
    tenant        name of that key's owner for the engine; "": nobody in particular
    queued        when the engine got it
    first_token   when its first token came
    held_bytes    of its body, as far as it has been read
    failed        status of an error that happened after "200 OK" was sent
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
    held_bytes: int = 0
    failed: int | None = None

    def took(self, now: float) -> Took | None:
        """How long it took, ending now; None: it made no tokens. A token's time is that of samples of mean length."""
        if self.first_token is None:
            return None
        more = self.output_tokens / self.samples - 1 if self.samples else 0.0
        each = (now - self.first_token) / more if more > 0 else None
        return Took(self.first_token - self.started, each, now - self.started)

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.output_tokens

    def submitted(self, streams: Sequence[RequestStream], drawn: int) -> None:
        """The engine has got all prompts, `drawn` samples of each."""
        self.queued = time.monotonic()
        self.samples += drawn * len(streams)
        self.prompt_tokens += sum(len(stream.prompt_token_ids) for stream in streams)

    def ended(self, streams: Iterable[RequestStream]) -> None:
        """It is over, well or not: what it has cost is known."""
        for stream in streams:
            self.output_tokens += stream.output_tokens
            self.cached_tokens += stream.cached_tokens
            first = stream.first_token
            if first is not None:
                self.first_token = first if self.first_token is None else min(first, self.first_token)


COUNTS = web.RequestKey("COUNTS", RequestCounts)
