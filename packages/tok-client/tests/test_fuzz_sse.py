"""Fuzz tests of server-sent events: chunking changes no event, and junk raises an error of the client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from support.fuzzing import VALUES, fuzzed, torn
from tok_client import TokError
from tok_client.errors import APIResponseError
from tok_client.requests.generation import CHAT, COMPLETION, RESPONSE
from tok_client.transport.call import Call
from tok_client.transport.sse import SSEDecoder
from tok_client.transport.streaming import AsyncStream

LINES = [b"data: ", b"data:", b"data", b"event: ", b"event: error", b"id: 1", b"retry: x", b":", b": hi", b"[DONE]"]
ENDS = [b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n"]
PIECES = st.sampled_from(
    [*LINES, *ENDS, b"\xef\xbb\xbf", b"\xff", b"\x00", "é€𝄞".encode(), b"{", b"}", b'"', b" " * 300]
)
STREAMS = st.lists(PIECES | st.binary(max_size=6), max_size=24).map(b"".join)
EVENT = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
ITEM = b'event: response.output_item.added\ndata: {"type":"response.output_item.added","sequence_number":0,'
ITEM += b'"output_index":0,"item":{"type":"new","id":"n"}}\n\n'
LAST = b'event: response.completed\ndata: {"type":"response.completed","sequence_number":1,"response":'
LAST += b'{"id":"r","created_at":1,"status":"completed","model":"m","output":[]}}\n\n'
SAID = [EVENT * 2 + b"data: [DONE]\n\n", ITEM + LAST]


def cut(data: bytes, places: Sequence[int]) -> Iterator[bytes]:
    ends = sorted(place % (len(data) + 1) for place in places)
    for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
        yield data[start:end]


def reference(data: bytes) -> list[tuple[str, bytes]]:
    """Return the events of a whole stream by WHATWG HTML, section 9.2."""
    found, name, lines = list[tuple[str, bytes]](), "", list[bytes]()
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for line in text.split(b"\n")[:-1]:
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if not line:
            if lines:
                found.append((name or "message", b"\n".join(lines)))
            name, lines = "", []
        elif field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return found


@fuzzed(200)
@given(STREAMS, st.lists(st.integers(0, 500), max_size=12))
def test_sse_decoder_equals_the_whatwg_standard_at_any_chunking(data: bytes, places: list[int]) -> None:
    decoder = SSEDecoder()
    assert [tuple(event) for piece in cut(data, places) for event in decoder.feed(piece)] == reference(data)


@fuzzed(100)
@given(STREAMS, st.integers(1, 40), st.integers(1, 60))
def test_sse_decoder_never_yields_events_above_the_bound(data: bytes, most: int, step: int) -> None:
    decoder = SSEDecoder(most)
    try:
        for piece in cut(data, range(step, len(data), step)):
            assert all(len(event.data) <= most for event in decoder.feed(piece))
    except APIResponseError:
        assert len(data) > most


@pytest.mark.parametrize("line", [b"data: ", b": ", b"", b"event: "])
def test_sse_decoder_reads_a_huge_line_in_linear_time(line: bytes) -> None:
    decoder, began = SSEDecoder(8 << 20), time.process_time()
    assert not decoder.feed(line)
    for _ in range((8 << 20) // 512 - 1):
        assert not decoder.feed(b"x" * 512)
    with pytest.raises(APIResponseError):
        decoder.feed(b"x" * 1024)
    assert time.process_time() - began < 20  # copying a line's pieces each time would take minutes


class Response:
    """The parts of an aiohttp response that a stream reads, over given chunks."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())
        self.url = URL("http://127.0.0.1/")
        self.content = self
        self._pieces = pieces

    async def readany(self) -> bytes:
        return next((piece for piece in self._pieces if piece), b"")

    def close(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


CALLS: list[Call[Any]] = [
    COMPLETION.streamed({"model": "m", "prompt": "a"}),
    CHAT.streamed({"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    RESPONSE.streamed({"input": "a"}),
]
DATA = VALUES.map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n")


@fuzzed(150)
@given(
    call=st.sampled_from(CALLS),
    data=torn(SAID) | STREAMS | DATA | st.tuples(st.sampled_from(SAID), DATA).map(b"".join),
    places=st.lists(st.integers(0, 500), max_size=6),
)
async def test_a_stream_of_junk_ends_or_raises_a_tok_error(call: Call[Any], data: bytes, places: list[int]) -> None:
    stream = AsyncStream(Response(cut(data, places)), call)  # type: ignore[arg-type]
    try:
        found = [chunk async for chunk in stream]
    except TokError:
        pass
    else:
        assert len(found) <= data.count(b"data")
    assert stream.closed
