"""Limits on real sockets: a client above a limit gets an error that names it and holds no resources afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from support.idle_connections import hold
from support.patience import PATIENCE, until, wait_until
from support.paused_engine import gated
from support.serving import Answer, Server, serving
from tok_core import InvalidField, SamplingParams
from tok_core.sampling_params import MAX_N
from tok_server import Settings
from tok_server.cli import make_parser
from tok_server.flags.server_flags import LIMITS, default_data_directory, make_settings
from tok_server.http.connections import Connection, Listener
from tok_server.settings import Limits

LIMITED: dict[str, Any] = {
    "max_connections": 24,
    "max_header": 2048,
    "max_body": 400_000,
    "max_bodies": 500_000,
    "max_n": 8,
    "max_queued": 4,
    "header_timeout": 1.0,
    "body_timeout": 1.0,
    "write_timeout": 2.0,
    "idle_timeout": 3.0,
    "request_timeout": 60.0,
}
PATIENT = LIMITED | {"body_timeout": 60.0, "write_timeout": 60.0, "idle_timeout": 60.0}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=x"}
UPLOAD = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
)
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def limited_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    few = {"max_running": 8, "kv_cache_tokens": 8192}
    data = str(tmp_path_factory.mktemp("data"))
    with serving(tiny_model, engine_options=few, send_buffer=16_384, data_dir=data, **LIMITED) as running:
        yield running


@pytest.fixture(scope="module")
def patient_server(tiny_model: Path) -> Iterator[Server]:
    """The same limits with long timeouts, for tests in which a busy machine may make clients slow."""
    with serving(tiny_model, engine_options={"max_running": 8, "kv_cache_tokens": 8192}, **PATIENT) as running:
        yield running


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def refused(server: Server, limit: str) -> float:
    return float(server.context.metrics.refused.labels(limit)._value.get())


def rest(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            found += part
    return found


def error_of(answer: bytes, status: int) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] == str(status).encode(), head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)


def settled_counters(server: Server) -> None:
    wait_until(lambda: server.context.open_requests == 0 and server.engine.open_requests == 0)
    wait_until(lambda: server.engine.stats()["pages_used"] == 0)
    assert server.context.body_bytes == 0


def test_slow_headers_get_408_naming_header_timeout(limited_server: Server) -> None:
    before = refused(limited_server, "header_timeout")
    with connect(limited_server) as connection:
        began = time.monotonic()
        answer = b""
        connection.settimeout(0.2)
        for byte in f"{HEAD}X-Slow: {'x' * 1000}".encode():
            connection.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                if answer := connection.recv(65_536):
                    break
            assert time.monotonic() - began < PATIENCE
        error = error_of(answer, 408)
    assert "--header-timeout" in str(error["message"])
    assert refused(limited_server, "header_timeout") == before + 1


def test_slow_body_gets_408_naming_body_timeout(limited_server: Server) -> None:
    before = refused(limited_server, "body_timeout")
    with connect(limited_server) as connection:
        connection.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n{{".encode())
        error = error_of(rest(connection), 408)
    assert "--body-timeout" in str(error["message"])
    assert refused(limited_server, "body_timeout") == before + 1
    settled_counters(limited_server)


def test_unread_stream_is_aborted_at_write_timeout(limited_server: Server) -> None:
    before = refused(limited_server, "write_timeout")
    fields = {"max_tokens": 200, "n": 8, "logprobs": 5, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": "one", **fields}).encode()
    with connect(limited_server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: refused(limited_server, "write_timeout") == before + 1)
        settled_counters(limited_server)


def test_unread_whole_answer_is_cut_off_at_write_timeout(limited_server: Server) -> None:
    before = refused(limited_server, "write_timeout")
    body = json.dumps({"prompt": "one", "max_tokens": 200, "n": 8, "logprobs": 5, "ignore_eos": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", limited_server.port))
        connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: refused(limited_server, "write_timeout") == before + 1)
        settled_counters(limited_server)


def test_unread_file_download_is_cut_off_at_write_timeout(limited_server: Server) -> None:
    file = uploaded(limited_server, bytes(1 << 20))
    assert limited_server.call("GET", f"/v1/files/{file}/content").body == bytes(1 << 20)
    assert limited_server.call("HEAD", f"/v1/files/{file}/content").headers["content-length"] == str(1 << 20)
    before = refused(limited_server, "write_timeout")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", limited_server.port))
        connection.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_until(lambda: refused(limited_server, "write_timeout") == before + 1)
        settled_counters(limited_server)


def uploaded(server: Server, data: bytes) -> str:
    """Upload a file and return its id."""
    answer = server.call("POST", "/v1/files", UPLOAD + data + b"\r\n--x--\r\n", MULTIPART)
    assert answer.status == 200, answer.body
    return str(answer.json()["id"])


def test_slow_upload_gets_408_naming_body_timeout(limited_server: Server) -> None:
    before = refused(limited_server, "body_timeout")
    with connect(limited_server) as connection:
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MULTIPART['Content-Type']}\r\n"
        connection.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode() + UPLOAD)
        answer, began = b"", time.monotonic()
        connection.settimeout(0.1)
        while not answer:
            connection.sendall(b"x" * 100)
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65_536)
            assert time.monotonic() - began < PATIENCE
    assert "--body-timeout" in str(error_of(answer, 408)["message"])
    assert refused(limited_server, "body_timeout") == before + 1
    settled_counters(limited_server)


def test_body_sent_after_its_413_is_not_parsed_as_a_request(patient_server: Server) -> None:
    body = b" " * (LIMITED["max_body"] + 1)
    with connect(patient_server) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode())
        error_of(connection.recv(65_536), 413)
        connection.sendall(body)
        connection.settimeout(1.5 * LIMITED["header_timeout"])
        with pytest.raises(TimeoutError):  # neither an answer nor a close
            connection.recv(1)
        connection.settimeout(PATIENCE)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


async def test_time_of_a_blocked_event_loop_does_not_count_for_timeouts(patient_server: Server) -> None:
    loop = asyncio.get_running_loop()
    listener = Listener(patient_server.context, web.Server(lambda request: None))  # type: ignore[arg-type, return-value]
    looking = asyncio.create_task(listener.check_connections())
    await asyncio.sleep(0)
    loop_start, listener_start = loop.time(), listener.now()
    time.sleep(0.5)  # blocks the event loop

    def lag() -> float:
        return loop.time() - loop_start - (listener.now() - listener_start)

    while lag() <= 0:
        await asyncio.sleep(0.01)
    looking.cancel()
    largest = max(lag() for _ in range(100))  # a pause between the two clocks makes it smaller
    assert largest >= 0.5 - LIMITED["header_timeout"] / 8 - 0.01


async def test_slow_reader_is_not_cut_off_until_it_stops_reading(patient_server: Server) -> None:
    """Only this test advances the clock."""
    before, size, now = refused(patient_server, "write_timeout"), 8 << 20, [0.0]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request.protocol, Connection)
        request.protocol.begin(request.writer, request.content)
        return web.Response(body=bytes(size))

    listener = Listener(patient_server.context, web.Server(answer))
    listener._loop_time = lambda: now[0]
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket() as client:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # connections inherit it
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        client.connect(port.getsockname())
        server = await asyncio.get_running_loop().create_server(listener, sock=port)
        reader, writer = await asyncio.open_connection(sock=client, limit=8192)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(20):
            assert await reader.readexactly(size // 40)
            (connection,) = listener._open
            connection.check(now[0])
            now[0] += 0.9 * PATIENT["write_timeout"]
            connection.check(now[0])
        assert refused(patient_server, "write_timeout") == before
        now[0] += 0.2 * PATIENT["write_timeout"]
        connection.check(now[0])
        assert refused(patient_server, "write_timeout") == before + 1
        with contextlib.suppress(ConnectionResetError):
            assert len(await reader.read()) < size // 2
        await until(lambda: not listener._open)
        writer.close()
        server.close()


def test_an_idle_connection_is_closed(limited_server: Server) -> None:
    with connect(limited_server) as fresh, connect(limited_server) as used:
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert rest(fresh) == b""
        assert rest(used).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("where", ["/v1/models?{}", "/v1/models HTTP/1.1\r\nX-Long: {}\r\nX-Rest:"])
def test_a_header_that_is_too_long_is_answered_431(limited_server: Server, where: str) -> None:
    before = refused(limited_server, "max_header")
    with connect(limited_server) as connection:
        connection.sendall(f"GET {where.format('x' * 5000)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        error = error_of(rest(connection), 431)
    assert "--max-header" in str(error["message"])
    assert refused(limited_server, "max_header") == before + 1


def test_malformed_http_gets_400_in_openai_error_shape(limited_server: Server) -> None:
    hello_of_tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n"
    for text in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n", hello_of_tls):
        with connect(limited_server) as connection:
            connection.sendall(text)
            error_of(rest(connection), 400)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_answered_413(limited_server: Server, chunked: bool) -> None:
    before = refused(limited_server, "max_body")
    body = b" " * (LIMITED["max_body"] + 1)
    with connect(limited_server) as connection:
        if chunked:
            connection.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body)
        else:
            connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode())
        error = error_of(connection.recv(65_536), 413)
    assert error["code"] == "request_too_large"
    assert "--max-body" in str(error["message"])
    assert refused(limited_server, "max_body") == before + 1
    settled_counters(limited_server)


def test_bodies_above_max_bodies_in_total_get_503_until_memory_is_free(patient_server: Server) -> None:
    before = refused(patient_server, "max_bodies")
    half = f"{HEAD}Content-Length: 300001\r\n\r\n".encode() + b" " * 300_000
    with connect(patient_server) as first, connect(patient_server) as second:
        first.sendall(half)
        wait_until(lambda: patient_server.context.body_bytes >= 300_000)
        second.sendall(half)
        answer = second.recv(65_536)
        assert b"Retry-After: 1" in answer
        assert "--max-bodies" in str(error_of(answer, 503)["message"])
    assert refused(patient_server, "max_bodies") == before + 1
    settled_counters(patient_server)
    assert patient_server.complete(prompt="one", max_tokens=1).status == 200


def test_gzip_bomb_is_refused_by_its_decompressed_size(limited_server: Server) -> None:
    before, resident = refused(limited_server, "max_body"), psutil.Process().memory_info().rss
    bomb = gzip.compress(b" " * (256 << 20), 1)
    answer = limited_server.call("POST", "/v1/completions", bomb[:390_000], {"Content-Encoding": "gzip"})
    assert answer.status == 413
    assert refused(limited_server, "max_body") == before + 1
    assert psutil.Process().memory_info().rss - resident < 121 << 20
    settled_counters(limited_server)


def test_unsupported_content_encoding_gets_415(limited_server: Server) -> None:
    body = gzip.compress(json.dumps({"prompt": "one"}).encode())
    for encoding in ("gzip, gzip", "compress", "x" * 1000, "br", "zstd"):
        answer = limited_server.call("POST", "/v1/completions", body, {"Content-Encoding": encoding})
        assert answer.status == 415
        assert answer.error()["param"] == "Content-Encoding"
    plain = json.dumps({"prompt": "one", "max_tokens": 1}).encode()
    assert limited_server.call("POST", "/v1/completions", plain, {"Content-Encoding": "identity"}).status == 200


def test_n_above_max_n_gets_400_naming_n(limited_server: Server) -> None:
    for ask in (
        limited_server.complete(prompt="one", n=9),
        limited_server.chat(messages=[{"role": "user", "content": "a"}], n=9),
    ):
        assert ask.status == 400
        assert ask.error()["param"] == "n"
        assert "--max-n" in str(ask.error()["message"])
    assert limited_server.complete(prompt="one", n=8, max_tokens=1).status == 200


def test_connections_above_max_connections_get_503_until_others_close(patient_server: Server) -> None:
    before = refused(patient_server, "max_connections")
    with contextlib.ExitStack() as stack:
        wait_until(lambda: open_connections(patient_server) == 0)
        for _ in range(24):
            stack.enter_context(connect(patient_server))
        wait_until(lambda: open_connections(patient_server) == 24)
        with connect(patient_server) as one_more:
            answer = rest(one_more)
        assert "--max-connections" in str(error_of(answer, 503)["message"])
        assert b"Retry-After: 1" in answer
    assert refused(patient_server, "max_connections") == before + 1
    wait_until(lambda: patient_server.call("GET", "/health").status == 200)


def open_connections(server: Server) -> float:
    (family,) = server.context.metrics.connections.collect()
    return float(family.samples[0].value)


def test_requests_above_max_queued_get_429(limited_server: Server) -> None:
    before = refused(limited_server, "max_queued")
    fields = {"prompt": "one", "max_tokens": 100, "n": 8, "ignore_eos": True}
    with (
        ThreadPoolExecutor(16) as pool,
        gated(limited_server.engine) as gate,
    ):  # the first requests run until all have come
        asked = [pool.submit(limited_server.complete, **fields, seed=seed) for seed in range(16)]
        wait_until(
            lambda: refused(limited_server, "max_queued") > before and sum(one.done() for one in asked) >= 16 - 8
        )
        gate.open()
        answers: list[Answer] = [one.result() for one in asked]
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    for answer in answers:
        if answer.status == 429:
            assert answer.headers["retry-after"] == "1"
            assert answer.error()["code"] == "max_queued"
            assert "--max-queued" in str(answer.error()["message"])
    assert refused(limited_server, "max_queued") == before + statuses.count(429)
    settled_counters(limited_server)


@pytest.mark.parametrize("stream", [False, True])
def test_request_above_request_timeout_is_aborted_with_an_error(tiny_model: Path, stream: bool) -> None:
    with serving(tiny_model, request_timeout=0.5) as server:
        fields = {"max_tokens": 1000, "n": 32, "ignore_eos": True}
        with gated(server.engine, steps=20):
            answer = server.complete(prompt="one", stream=stream, **fields)
        if stream:
            assert answer.status == 200
            error = json.loads(answer.events()[-1])["error"]
        else:
            assert answer.status == 504
            error = answer.error()
        assert error["code"] == "request_timeout"
        assert "--request-timeout" in error["message"]
        assert refused(server, "request_timeout") == 1
        settled_counters(server)


def test_every_limit_has_a_flag_and_an_error_with_its_allowed_range() -> None:
    options = make_parser().parse_args(["serve", "m"])
    data_dir = default_data_directory("m")
    assert make_settings(options, "m") == Settings(model_name="m", data_dir=data_dir, require_data_dir=False)
    assert set(Limits.__struct_fields__) == set(LIMITS)
    for name in LIMITS:
        words = ["serve", "m", "--" + name.replace("_", "-"), "4096"]
        assert getattr(make_settings(make_parser().parse_args(words), "m"), name) == 4096
        low = -(1 << 31) if name == "min_client_priority" else -1
        with pytest.raises(InvalidField, match=rf"^{name} is {low}.*; allowed: .*(above|from) -?\d"):
            Limits(**{name: low})


def test_max_n_is_at_most_the_engines_maximum() -> None:
    assert Limits().max_n == MAX_N
    with pytest.raises(InvalidField, match=f"max_n is {MAX_N + 1}; allowed: integers from 1 to {MAX_N}"):
        Limits(max_n=MAX_N + 1)
    with pytest.raises(InvalidField, match="n is"):
        SamplingParams(n=MAX_N + 1)


async def test_hundreds_of_clients_with_slow_headers_all_get_408(tiny_model: Path) -> None:
    """Unlike one slow client, hundreds make the check of all connections take time."""
    with serving(tiny_model, header_timeout=1.0) as server:

        async def drip() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\n")
            found = await reader.read()
            writer.close()
            return found

        answers = await asyncio.gather(*(drip() for _ in range(300)))
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        wait_until(lambda: open_connections(server) == 0)


async def test_idle_connections_take_under_128_kib_each(tiny_model: Path) -> None:
    count = 500
    with serving(tiny_model) as server:
        # Both ends of each connection are in this process.
        assert await hold(server.port, count, os.getpid()) < count * (128 << 10)
        wait_until(lambda: open_connections(server) == 0)


def unread_stream(server: Server, **fields: object) -> socket.socket:
    """Open a connection that requests a stream and reads nothing of it."""
    body = json.dumps({"prompt": "one", "ignore_eos": True, "stream": True, **fields}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.settimeout(PATIENCE)
    connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize(
    "fields",
    [{"n": 8, "logprobs": 5}, {"n": 4, "logprobs": 5, "prompt": ["one", "two"]}, {"n": 64}],
    ids=["log-probabilities", "prompts", "samples"],
)
def test_unread_stream_is_aborted_at_max_unread(tiny_model: Path, fields: dict[str, object]) -> None:
    options = {"max_running": 64, "kv_cache_tokens": 65_536}
    with serving(tiny_model, engine_options=options, send_buffer=4096, max_unread=40_000) as server:
        with unread_stream(server, max_tokens=900, **fields) as connection:
            wait_until(lambda: refused(server, "max_unread") == 1)
            wait_until(lambda: server.engine.open_requests == 0)  # nothing more is computed
            found = rest(connection)
        last = found.rstrip(b"\r\n0").rpartition(b"data: ")[2]
        error = json.loads(last)["error"]
        assert error["code"] == "unread_stream"
        assert "--max-unread" in error["message"]
        settled_counters(server)


def test_late_reader_within_max_unread_gets_the_whole_stream(tiny_model: Path) -> None:
    with serving(tiny_model, send_buffer=4096) as server:
        with unread_stream(server, max_tokens=900, n=4) as connection:
            wait_until(lambda: server.context.open_requests == 1 and server.engine.open_requests == 1)
            wait_until(lambda: server.engine.open_requests == 0)  # all has been computed, and little of it read
            assert server.context.open_requests == 1
            found = rest(connection)
        assert found.count(b'"finish_reason":"length"') == 4
        assert b"[DONE]" in found
        assert refused(server, "max_unread") == 0
