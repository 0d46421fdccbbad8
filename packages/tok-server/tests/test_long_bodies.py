"""Bodies larger than one read: reading from the client pauses and resumes."""

from __future__ import annotations

import gzip
import json
import socket

import pytest

from support.patience import PATIENCE
from support.serving import Server

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def request(headers: str = "", *, packed: bool = False, **fields: object) -> bytes:
    """Return a completion request of one token, unless `fields` say otherwise."""
    body = json.dumps({"prompt": "one", "max_tokens": 1, **fields}).encode()
    if packed:
        body, headers = gzip.compress(body), f"{headers}Content-Encoding: gzip\r\n"
    return f"{HEAD}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("packed", [False, True])
def test_pipelined_bodies_are_read_after_the_request_in_progress(server: Server, packed: bool) -> None:
    slow, long = request(max_tokens=100, ignore_eos=True), request(packed=packed, user="x" * 1_000_000)
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(slow + long + long + HEALTH)
        while part := connection.recv(65_536):
            found += part
    assert found.count(b"HTTP/1.1 200 OK") == 4
    assert found.count(b'"object":"text_completion"') == 3


def test_all_requests_pipelined_behind_a_body_are_answered(server: Server) -> None:
    """The parser stops while many requests wait; this is not a pause of reading."""
    first, one = request("Expect: 100-continue\r\n"), request()
    cut = first.index(b"\r\n\r\n") + 4
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(first[:cut])
        assert connection.recv(65_536).startswith(b"HTTP/1.1 100 Continue")  # the request is being handled
        connection.sendall(first[cut:] + one * 39 + HEALTH)
        while part := connection.recv(65_536):
            found += part
    assert found.count(b'"object":"text_completion"') == 40
