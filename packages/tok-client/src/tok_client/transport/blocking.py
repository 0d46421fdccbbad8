"""Blocking interface to the transport: the same calls, run on the event loop's thread."""

from __future__ import annotations

from os import PathLike
from typing import TypeVar

from tok_client.transport.call import Call
from tok_client.transport.loop_thread import LoopThread
from tok_client.transport.streaming import Stream
from tok_client.transport.transport import Transport

T = TypeVar("T")


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
