"""Typed one-way message channels between the processes of one replica, as ZeroMQ sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from tok_core.messages.codec import decoder, encode

Message = TypeVar("Message")


class Sender:
    """The sending end of a channel. Sending never blocks and never drops; for one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PUSH)
        self.socket.set_hwm(0)
        self.socket.connect(address)

    def send(self, message: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
        """Queue one message."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Queue one message that is already encoded."""
        self.socket.send(data, copy=False)

    def close(self, linger: float) -> None:
        """Close the channel; queued messages are still sent for up to `linger` seconds."""
        self.socket.close(linger=int(linger * 1000))


class Receiver(Generic[Message]):
    """The receiving end of a channel, which binds its address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, kind: Any) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address)
        self._decoder = decoder(kind)
        self._poller = zmq.Poller()  # kept, since `socket.poll` creates one for every call
        self._poller.register(self.socket, zmq.POLLIN)

    @property
    def address(self) -> str:
        """Return the address it is bound to; for `tcp://HOST:*`, with the port chosen."""
        return str(self.socket.get_string(zmq.LAST_ENDPOINT))

    def next(self) -> Message | None:
        """Return the next message; None if there is none."""
        if not self._poller.poll(0):  # takes a third of the time of `recv` raising `zmq.Again`
            return None
        frame = self.socket.recv(copy=False)
        message: Message = self._decoder.decode(frame.buffer)
        return message

    def all(self) -> list[Message]:
        """Return all messages that have arrived."""
        arrived: list[Message] = []
        while (message := self.next()) is not None:
            arrived.append(message)
        return arrived

    def wait(self, seconds: float | None) -> Message | None:
        """Return the next message, after waiting up to `seconds` for it (None: forever); None if none has come."""
        message = self.next()
        if message is None and self._poller.poll(None if seconds is None else int(seconds * 1000)):
            return self.next()
        return message

    def close(self) -> None:
        """Close the channel."""
        self.socket.close(linger=0)
