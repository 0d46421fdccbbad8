"""Sockets: typed one-way message channels between the processes of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from tok_core.messages import decoder, encode

Message = TypeVar("Message")


class Sender:
    """The writing end of a channel. Never blocks and never drops; for one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PUSH)
        self.socket.set_hwm(0)
        self.socket.connect(address)

    def send(self, message: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
        """Queues one message."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Queues one message that is encoded already."""
        self.socket.send(data, copy=False)

    def close(self, linger: float) -> None:
        """Closes, once what is queued has been read, at the latest after `linger` seconds."""
        self.socket.close(linger=int(linger * 1000))


class Receiver(Generic[Message]):
    """The reading end of a channel, and the one that owns its address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, kind: Any) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address)
        self._decoder = decoder(kind)
        self._poller = zmq.Poller()  # one of its own: the socket's `poll` makes one each time
        self._poller.register(self.socket, zmq.POLLIN)

    @property
    def address(self) -> str:
        """Where it is bound: of `tcp://HOST:*`, with the port that was free."""
        return str(self.socket.get_string(zmq.LAST_ENDPOINT))

    def next(self) -> Message | None:
        """The next message, None if there is none."""
        if not self._poller.poll(0):  # in a third of the time that an exception takes
            return None
        frame = self.socket.recv(copy=False)
        message: Message = self._decoder.decode(frame.buffer)
        return message

    def all(self) -> list[Message]:
        """Every message that has arrived."""
        arrived: list[Message] = []
        while (message := self.next()) is not None:
            arrived.append(message)
        return arrived

    def wait(self, seconds: float | None) -> Message | None:
        """The next message, waiting up to `seconds` for it (None: for ever)."""
        message = self.next()
        if message is None and self._poller.poll(None if seconds is None else int(seconds * 1000)):
            return self.next()
        return message

    def close(self) -> None:
        """Closes the channel."""
        self.socket.close(linger=0)
