"""Tests of both clients against a misbehaving server: retries, errors and timeouts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from support.patience import PATIENCE, until
from tok_client import (
    APIConnectionError,
    APIResponseError,
    APIStatusError,
    APITimeoutError,
    AsyncClient,
    AuthenticationError,
    Backoff,
    Client,
    Completion,
    InternalServerError,
    PermissionDeniedError,
    RateLimitError,
    RequestTooLargeError,
    StreamError,
    TokError,
    UnprocessableEntityError,
)

COMPLETION = b'{"id":"c","object":"text_completion","created":1,"model":"m","choices":[]}'
CHUNK = b"data: " + COMPLETION + b"\n\n"
DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FaultyServer:
    """A server that answers requests with the handlers in `script` in turn, and repeats the last one."""

    def __init__(self) -> None:
        self.script: list[Handler] = []
        self.requests = 0
        self.chunks = 0  # received by the client
        app = web.Application()
        app[BAD] = self
        app.router.add_post("/v1/completions", self.handle)
        self.server = TestServer(app)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.requests += 1
        return await self.script[min(self.requests, len(self.script)) - 1](request)


BAD = web.AppKey("BAD", FaultyServer)


@pytest_asyncio.fixture
async def faulty_server() -> AsyncIterator[FaultyServer]:
    faulty_server = FaultyServer()
    async with faulty_server.server:
        yield faulty_server


def respond_with(body: bytes = COMPLETION, status: int = 200, **headers: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, content_type="application/json", headers=named)

    return handle


def stream_pieces(*pieces: bytes, then: str = "end") -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-request-id": "r1"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        # Wait for the client: a reset connection may lose data that it has not read yet.
        await until(lambda: then != "abort" or request.app[BAD].chunks == b"".join(pieces).count(CHUNK))
        await end_response(request, then)
        return response

    return handle


async def break_off(request: web.Request) -> web.StreamResponse:
    await end_response(request, "abort")
    return web.Response()


async def send_half_body(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(COMPLETION[:20])
    await end_response(request, "abort")
    return response


async def stay_silent(request: web.Request) -> web.StreamResponse:
    await end_response(request, "stall")
    return web.Response()


async def end_response(request: web.Request, how: str) -> None:
    connection = request.transport
    assert connection is not None
    if how == "abort":
        connection.close()
    if how == "stall":
        await until(connection.is_closing)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: the number of chunks or answers, the waits before retries, and the error."""

    chunks: int
    waits: list[float]
    error: TokError | None = None


Call = Callable[..., Awaitable[Outcome]]


async def call_async(
    faulty_server: FaultyServer, url: str = "", stream: bool = False, timeout: float = 30.0
) -> Outcome:
    waits: list[float] = []
    base, backoff = url or str(faulty_server.server.make_url("/v1")), backoff_into(waits)
    async with AsyncClient(base, timeout=timeout, backoff=backoff) as client:
        try:
            got = await client.completions.create(model="m", prompt="a", stream=stream)
            if isinstance(got, Completion):
                faulty_server.chunks += 1
            else:
                async for _ in got:
                    faulty_server.chunks += 1
        except TokError as error:
            return Outcome(faulty_server.chunks, waits, error)
    return Outcome(faulty_server.chunks, waits)


async def call_blocking(
    faulty_server: FaultyServer, url: str = "", stream: bool = False, timeout: float = 30.0
) -> Outcome:
    waits: list[float] = []
    base, backoff = url or str(faulty_server.server.make_url("/v1")), backoff_into(waits)

    def call() -> Outcome:
        with Client(base, timeout=timeout, backoff=backoff) as client:
            try:
                got = client.completions.create(model="m", prompt="a", stream=stream)
                if isinstance(got, Completion):
                    faulty_server.chunks += 1
                else:
                    for _ in got:
                        faulty_server.chunks += 1
            except TokError as error:
                return Outcome(faulty_server.chunks, waits, error)
        return Outcome(faulty_server.chunks, waits)

    return await asyncio.to_thread(call)


def backoff_into(waits: list[float]) -> Backoff:
    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    return Backoff(sleep=sleep, uniform=lambda: 1.0)


both = pytest.mark.parametrize("call", [call_async, call_blocking])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


def good(stream: bool) -> Handler:
    return stream_pieces(CHUNK, DONE) if stream else respond_with()


@both
@streamed_or_not
@pytest.mark.parametrize(
    ("first", "waits"),
    [
        (respond_with(b"{}", 429, Retry_After="7"), [7.0]),
        (respond_with(b"{}", 429), [0.5]),
        (respond_with(b"oops", 500), [0.5]),
        (respond_with(b"{}", 503, Retry_After="0"), [0.5]),
        (respond_with(b"{}", 408), [0.5]),
        (respond_with(b"{}", 409), [0.5]),
        (break_off, [0.5]),
    ],
)
async def test_transient_errors_are_retried(
    faulty_server: FaultyServer, call: Call, stream: bool, first: Handler, waits: list[float]
) -> None:
    faulty_server.script = [first, good(stream)]
    outcome = await call(faulty_server, stream=stream)
    assert (outcome.error, outcome.chunks, outcome.waits, faulty_server.requests) == (None, 1, waits, 2)


@both
@streamed_or_not
async def test_after_the_last_retry_the_error_is_raised(faulty_server: FaultyServer, call: Call, stream: bool) -> None:
    faulty_server.script = [
        respond_with(b'{"error":{"message":"dead","type":"server_error","param":null,"code":"x"}}', 500)
    ]
    outcome = await call(faulty_server, stream=stream)
    assert isinstance(outcome.error, InternalServerError)
    assert (str(outcome.error), outcome.error.code) == ("500: dead", "x")
    assert (outcome.waits, faulty_server.requests) == ([0.5, 1.0], 3)


@both
@streamed_or_not
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AuthenticationError),
        (403, PermissionDeniedError),
        (413, RequestTooLargeError),
        (422, UnprocessableEntityError),
        (405, APIStatusError),
    ],
)
async def test_a_client_error_status_is_raised_without_retry(
    faulty_server: FaultyServer, call: Call, stream: bool, status: int, kind: type[APIStatusError]
) -> None:
    faulty_server.script = [respond_with(b"{}", status, x_request_id="r1")]
    outcome = await call(faulty_server, stream=stream)
    assert type(outcome.error) is kind
    assert isinstance(outcome.error, APIStatusError)
    assert (outcome.error.status_code, outcome.error.request_id, faulty_server.requests) == (status, "r1", 1)


@both
async def test_a_retry_after_longer_than_the_timeout_is_not_waited_for(faulty_server: FaultyServer, call: Call) -> None:
    faulty_server.script = [respond_with(b"{}", 429, Retry_After="31")]
    outcome = await call(faulty_server)
    assert isinstance(outcome.error, RateLimitError)
    assert (outcome.error.retry_after, outcome.waits, faulty_server.requests) == ("31", [], 1)


@both
async def test_a_redirect_is_raised_and_not_followed(faulty_server: FaultyServer, call: Call) -> None:
    faulty_server.script = [respond_with(b"", 307, Location="https://elsewhere/v1")]
    outcome = await call(faulty_server)
    assert isinstance(outcome.error, APIStatusError)
    assert "https://elsewhere/v1" in str(outcome.error)
    assert faulty_server.requests == 1


@both
async def test_a_truncated_body_is_retried_and_never_returned(faulty_server: FaultyServer, call: Call) -> None:
    faulty_server.script = [send_half_body]
    outcome = await call(faulty_server)
    assert type(outcome.error) is APIConnectionError
    assert (outcome.chunks, faulty_server.requests) == (0, 3)


@both
@streamed_or_not
async def test_a_refused_connection_is_retried_and_raised(
    faulty_server: FaultyServer, call: Call, stream: bool
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        outcome = await call(faulty_server, url=f"http://127.0.0.1:{held.getsockname()[1]}/v1", stream=stream)
    assert type(outcome.error) is APIConnectionError
    assert outcome.waits == [0.5, 1.0]


@both
@pytest.mark.parametrize("then", ["abort", "end"])
@pytest.mark.parametrize("rest", [b"", CHUNK[:30], b"data: [DONE]"])
async def test_a_truncated_stream_raises_after_its_chunks_without_retry(
    faulty_server: FaultyServer, call: Call, then: str, rest: bytes
) -> None:
    faulty_server.script = [stream_pieces(CHUNK, CHUNK + rest, then=then)]
    outcome = await call(faulty_server, stream=True)
    assert type(outcome.error) is APIConnectionError
    assert (outcome.chunks, faulty_server.requests) == (2, 1)


@both
@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"died","type":"server_error","param":null,"code":"x"}}\n\n',
        b'event: error\ndata: {"message":"died","type":"server_error","code":"x"}\n\n',
    ],
)
async def test_an_error_event_is_raised_after_the_chunks_before_it(
    faulty_server: FaultyServer, call: Call, event: bytes
) -> None:
    faulty_server.script = [stream_pieces(CHUNK + event + CHUNK + DONE)]
    outcome = await call(faulty_server, stream=True)
    assert isinstance(outcome.error, StreamError)
    assert (str(outcome.error), outcome.error.type, outcome.error.code) == ("died", "server_error", "x")
    assert (outcome.chunks, faulty_server.requests) == (1, 1)


@both
@pytest.mark.parametrize("garbage", [b"data: {\n\n", b'data: {"id":1}\n\n', b"data: \xff\n\n", b"data: []\n\n"])
async def test_a_malformed_stream_event_raises(faulty_server: FaultyServer, call: Call, garbage: bytes) -> None:
    faulty_server.script = [stream_pieces(CHUNK, garbage, DONE)]
    outcome = await call(faulty_server, stream=True)
    assert isinstance(outcome.error, APIResponseError)
    assert (outcome.chunks, faulty_server.requests) == (1, 1)


@both
@pytest.mark.parametrize("garbage", [b"", b"{", b"<html>", b'{"id":1}', b"\xff"])
async def test_a_malformed_completion_raises_with_its_body(
    faulty_server: FaultyServer, call: Call, garbage: bytes
) -> None:
    faulty_server.script = [respond_with(garbage)]
    outcome = await call(faulty_server)
    assert isinstance(outcome.error, APIResponseError)
    assert (outcome.error.body, faulty_server.requests) == (garbage, 1)


@both
async def test_a_json_answer_to_a_streamed_request_raises(faulty_server: FaultyServer, call: Call) -> None:
    faulty_server.script = [respond_with()]
    outcome = await call(faulty_server, stream=True)
    assert isinstance(outcome.error, APIResponseError)
    assert "application/json" in str(outcome.error)


async def timed_out(call: Call, handler: Handler, chunks: int, stream: bool) -> tuple[Outcome, int]:
    """Return the outcome of a call that timed out, and the number of requests.

    The server must receive the request, and the client `chunks`, within the timeout. On a machine too busy for that,
    another server is asked with twice the timeout.
    """
    timeout = 0.1
    while timeout < PATIENCE / 10:
        timeout *= 2
        async with (server := FaultyServer()).server:
            server.script = [handler]
            outcome = await call(server, stream=stream, timeout=timeout)
            if server.requests and outcome.chunks == chunks:
                return outcome, server.requests
    raise AssertionError(f"the last of many calls ended with {outcome}")


@both
@streamed_or_not
async def test_a_silent_server_times_out_without_retry(call: Call, stream: bool) -> None:
    outcome, requests = await timed_out(call, stay_silent, 0, stream)
    assert isinstance(outcome.error, APITimeoutError)
    assert isinstance(outcome.error, TimeoutError)
    assert (outcome.waits, requests) == ([], 1)


@both
async def test_a_stalled_stream_times_out_after_its_chunks(call: Call) -> None:
    outcome, requests = await timed_out(call, stream_pieces(CHUNK, then="stall"), 1, stream=True)
    assert isinstance(outcome.error, APITimeoutError)
    assert requests == 1


@both
async def test_a_stream_ends_at_done_while_the_connection_stays_open(faulty_server: FaultyServer, call: Call) -> None:
    faulty_server.script = [stream_pieces(CHUNK, DONE, then="stall")]
    outcome = await call(faulty_server, stream=True)
    assert (outcome.error, outcome.chunks) == (None, 1)


async def test_a_stream_has_the_request_id_of_its_response(faulty_server: FaultyServer) -> None:
    faulty_server.script = [stream_pieces(CHUNK, DONE)]
    async with (
        AsyncClient(str(faulty_server.server.make_url("/v1"))) as client,
        await client.completions.create(model="m", prompt="a", stream=True) as stream,
    ):
        assert stream.request_id == "r1"
