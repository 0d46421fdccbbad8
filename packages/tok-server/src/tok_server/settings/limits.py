"""Limits: bounds on what the server accepts and how long it waits; each is a flag of `tok serve`."""

from __future__ import annotations

import msgspec

from tok_core import InvalidField
from tok_core.sampling_params import MAX_N

MIB = 1 << 20
GIB = 1 << 30


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on sizes, counts and times. Validated when constructed (`InvalidField`).

    max_connections      open connections; further ones are refused with 503
    max_header           bytes of the request line, and of each header line
    max_body             bytes of a JSON body; `tok_server.wire.json_limits` bounds its structure
    max_bodies           bytes of all bodies held at once; further requests are refused with 503
    max_file             bytes of an uploaded file
    data_quota           bytes of all files and batch answers in the data directory; None: unlimited
    max_unread           bytes buffered of a stream whose client does not read; beyond, the stream is ended
    max_n                samples of one prompt, at most the engine's own limit
    min_client_priority  smallest `priority` that clients may ask for; requests of smaller priority preempt others
    max_queued           client prompts waiting for the engine at once, batch lines excluded. At the limit, further
                         requests are refused with 429, except for keys with fewer open prompts than an equal share
    rate_limit_requests  requests per minute and key, batch lines excluded; None: unlimited
    rate_limit_tokens    prompt and output tokens per minute and key, batches excluded; None: unlimited
    header_timeout       seconds in which a request's line and headers must arrive, once begun
    body_timeout         seconds in which a request's body must arrive
    write_timeout        seconds in which a client must take `tok_server.http.MIN_READ_BYTES` bytes of its response
    idle_timeout         seconds after which a connection without a request is closed
    request_timeout      seconds in which a request must be answered
    drain_timeout        seconds that open requests get to finish when the server is asked to stop
    """

    max_connections: int = 16_384
    max_header: int = 16_384
    max_body: int = 8 * MIB
    max_bodies: int = 2 * GIB
    max_file: int = 8 * GIB
    data_quota: int | None = None
    max_unread: int = MIB
    max_n: int = MAX_N
    min_client_priority: int = 0
    max_queued: int = 65_536
    rate_limit_requests: int | None = None
    rate_limit_tokens: int | None = None
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    idle_timeout: float = 300.0
    request_timeout: float = 3600.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, unit in COUNTS.items():
            value = getattr(self, name)
            if value is not None and value < MIN_VALUES.get(name, 1):
                raise InvalidField(name, value, f"{unit}, at least {MIN_VALUES.get(name, 1)}")
        if self.max_n > MAX_N:
            raise InvalidField("max_n", self.max_n, f"samples, at most {MAX_N} (the engine's limit)")
        if self.min_client_priority > MAX_CLIENT_PRIORITY:
            allowed = f"integers from {-MAX_CLIENT_PRIORITY} to {MAX_CLIENT_PRIORITY}"
            raise InvalidField("min_client_priority", self.min_client_priority, allowed)
        for name in SECONDS:
            if not getattr(self, name) > 0:
                raise InvalidField(name, getattr(self, name), "seconds above 0")
        if not self.drain_timeout >= 0:
            raise InvalidField("drain_timeout", self.drain_timeout, "seconds, at least 0")


COUNTS = {
    "max_connections": "connections",
    "max_header": "bytes",
    "max_body": "bytes",
    "max_bodies": "bytes",
    "max_file": "bytes",
    "data_quota": "bytes",
    "max_unread": "bytes",
    "max_n": "samples",
    "max_queued": "requests",
    "min_client_priority": "priorities",
    "rate_limit_requests": "requests per minute",
    "rate_limit_tokens": "tokens per minute",
}
MAX_CLIENT_PRIORITY = (1 << 31) - 1  # far below the priorities of batch lines, which come after every client
MIN_VALUES = {
    "max_header": 1024,  # bytes; less would refuse ordinary requests
    "max_queued": 0,
    "max_unread": 4096,  # bytes; less would end ordinary streams
    "min_client_priority": -MAX_CLIENT_PRIORITY,
}
SECONDS = ("header_timeout", "body_timeout", "write_timeout", "idle_timeout", "request_timeout")
