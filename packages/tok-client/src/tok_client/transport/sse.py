"""Decode server-sent events from bytes that may be split anywhere (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from typing import NamedTuple

from tok_client.errors import APIResponseError

MAX_EVENT_BYTES = 16 << 20  # bounds the memory that a broken stream can take
_BOM = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """One event: its name ("message" if the stream gives none) and its data in UTF-8, lines joined by LF."""

    event: str
    data: bytes


class SSEDecoder:
    """Decoder that turns the bytes of a stream into its events.

    The decoder works on bytes: line ends are ASCII, so that a split within a UTF-8 character does no harm. An
    incomplete event at the end of the stream is dropped.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()  # of an incomplete line
        self._started = False  # the byte order mark, if any, has been passed
        self._skip_lf = False  # the last line ended in CR: an LF right after it belongs to it
        self._event = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that `chunk` completes. APIResponseError: an event has more than `max_event_bytes`."""
        events = [event for line in self._lines(chunk) if (event := self._line(line)) is not None]
        if self._size + len(self._rest) > self._max_event_bytes:
            raise APIResponseError(f"the stream has an event of more than {self._max_event_bytes} bytes")
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that `chunk` completes, without their ends."""
        if not self._started:
            chunk = self._after_bom(chunk)
        if self._skip_lf and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_lf = False
        if b"\n" not in chunk and b"\r" not in chunk:
            self._rest += chunk  # in place: a long line in many small chunks costs linear time
            return []
        lines = (bytes(self._rest) + chunk).splitlines()
        self._skip_lf = chunk.endswith(b"\r")
        self._rest = bytearray(b"" if chunk.endswith((b"\n", b"\r")) else lines.pop())
        return lines

    def _after_bom(self, chunk: bytes) -> bytes:
        """Return the held-back bytes and `chunk` without a byte order mark; b"" while the mark is incomplete."""
        chunk = bytes(self._rest) + chunk
        self._rest.clear()
        if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
            self._rest += chunk
            return b""
        self._started = True
        return chunk.removeprefix(_BOM)

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")  # a comment has an empty name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value) + 1
            if self._size > self._max_event_bytes:
                raise APIResponseError(f"the stream has an event of more than {self._max_event_bytes} bytes")
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        data, event = self._data, self._event
        self._data, self._event, self._size = [], "", 0
        return ServerSentEvent(event or "message", b"\n".join(data)) if data else None
