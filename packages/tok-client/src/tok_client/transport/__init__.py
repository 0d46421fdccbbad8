"""Send calls over HTTP: one session, retries, streams, and a blocking interface to them."""

from __future__ import annotations

from tok_client.transport.backoff import Backoff
from tok_client.transport.call import Call
from tok_client.transport.loop_thread import LoopThread
from tok_client.transport.streaming import AsyncStream, Stream
from tok_client.transport.transport import BlockingTransport, Transport, check_timeout

__all__ = [
    "AsyncStream",
    "Backoff",
    "BlockingTransport",
    "Call",
    "LoopThread",
    "Stream",
    "Transport",
    "check_timeout",
]
