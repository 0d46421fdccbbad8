"""Tests of the decoder of server-sent events, which yields the same events for any chunking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_client.errors import APIResponseError
from tok_client.transport.sse import ServerSentEvent, SSEDecoder

WHOLE = (
    "\ufeff: a comment\r\n"
    "data: plain\n\n"
    "data:no space\r\rdata:  two spaces\r\n\r\n"
    "event: error\ndata: two\ndata: lines\n\n"
    ":\n\n\n"
    "data\n\n"
    "id: 1\nretry: 5\nunknown: x\ndata: é€𝄞 \n\n"
    "event: lost\n\n"
    'data: {"a": "b: c"}\r\n\n'
    "data: never ended\n"
).encode()
EVENTS = [
    ("message", "plain"),
    ("message", "no space"),
    ("message", " two spaces"),
    ("error", "two\nlines"),
    ("message", ""),
    ("message", "é€𝄞 "),
    ("message", '{"a": "b: c"}'),
]


def decode(pieces: list[bytes], max_event_bytes: int = 1 << 20) -> list[tuple[str, str]]:
    decoder = SSEDecoder(max_event_bytes)
    return [(event.event, event.data.decode()) for piece in pieces for event in decoder.feed(piece)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [*sorted(places), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_sse_stream_in_one_chunk_yields_its_events() -> None:
    assert decode([WHOLE]) == EVENTS


def test_sse_stream_cut_at_any_byte_yields_the_same_events() -> None:
    for place in range(len(WHOLE) + 1):
        assert decode(cut(WHOLE, [place])) == EVENTS, place


def test_sse_stream_byte_by_byte_yields_the_same_events() -> None:
    assert decode([WHOLE[i : i + 1] for i in range(len(WHOLE))]) == EVENTS


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_sse_stream_in_any_chunks_yields_the_same_events(places: list[int]) -> None:
    assert decode(cut(WHOLE, places)) == EVENTS


LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)


@given(
    st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=4),
    st.lists(st.sampled_from(["\n", "\r", "\r\n"]), min_size=16, max_size=16),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_sse_data_with_any_line_endings_is_decoded(events: list[list[str]], ends: list[str], places: list[int]) -> None:
    text = ""
    end = iter(ends)
    for lines in events:
        text += "".join(f"data: {line}{next(end)}" for line in lines)
        # An LF after a lone CR would belong to the same line ending.
        last = next(end)
        text += "\r" if text.endswith("\r") and last == "\n" else last
    data = text.encode()
    expected = [("message", "\n".join(lines)) for lines in events]
    assert decode(cut(data, [min(place, len(data)) for place in places])) == expected


def test_sse_decoder_drops_only_a_leading_byte_order_mark() -> None:
    assert decode([b"\xef\xbb", b"\xbfdata: a\n\n", b"\xef\xbb\xbfdata: b\n\n"]) == [("message", "a")]
    assert decode([b"\xef\xbb", b"x: not a mark\n", b"data: a\n\n"]) == [("message", "a")]


def test_sse_event_is_yielded_before_the_lf_of_its_last_crlf() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"data: a\r\n\r") == [ServerSentEvent("message", b"a")]
    assert decoder.feed(b"\ndata: b\r\n\r\n") == [ServerSentEvent("message", b"b")]


@pytest.mark.parametrize(
    "data",
    [b"data: " + b"x" * 100, b"data: xxxxxxxx\n" * 20, b": " + b"x" * 200, b"data: xxxxxxxx\n" * 20 + b"\n"],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_sse_event_larger_than_the_bound_is_an_error(data: bytes, size: int) -> None:
    with pytest.raises(APIResponseError, match="more than 64 bytes"):
        decode(cut(data, list(range(size, len(data), size))), max_event_bytes=64)


def test_sse_bound_applies_to_one_event_and_not_to_the_stream() -> None:
    decoder = SSEDecoder(max_event_bytes=64)
    assert len(decoder.feed(b"data: 0123456789\n\n" * 1000)) == 1000
