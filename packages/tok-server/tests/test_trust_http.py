"""Requests that aiohttp refuses before any handler are answered in the shape of all errors."""

from __future__ import annotations

import json
import socket

import pytest

from support.patience import PATIENCE
from support.serving import Server

HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"


def exchange(server: Server, request: bytes) -> tuple[bytes, dict[str, object]]:
    """Send a request; return the head of its answer and the error."""
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        while part := connection.recv(65_536):
            found += part
    head, _, body = found.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return head, error


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
def test_an_unknown_expectation_is_answered_417(server: Server, path: str) -> None:
    head, error = exchange(server, f"{HEAD.format(path)}Expect: a-miracle\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    assert head.startswith(b"HTTP/1.1 417 ")
    assert b"x-request-id: " in head
    assert error["message"] == "Expect is 'a-miracle'; allowed: 100-continue"


def test_a_body_that_cannot_be_decompressed_gets_400_and_no_log_trace(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    head, error = exchange(
        server, f"{HEAD.format('/v1/completions')}Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nplain".encode()
    )
    assert head.startswith(b"HTTP/1.1 400 ")
    assert error["message"] == "the body cannot be read: Can not decode content-encoding: gzip"
    assert "Traceback" not in caplog.text
