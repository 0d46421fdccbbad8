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

from support.patience import until
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


class Bad:
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


BAD = web.AppKey("BAD", Bad)


@pytest_asyncio.fixture
async def bad() -> AsyncIterator[Bad]:
    bad = Bad()
    async with bad.server:
        yield bad


def says(body: bytes = COMPLETION, status: int = 200, **headers: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, content_type="application/json", headers=named)

    return handle


def streams(*pieces: bytes, then: str = "end") -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-request-id": "r1"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        # Wait for the client: a reset connection may lose data that it has not read yet.
        await until(lambda: then != "abort" or request.app[BAD].chunks == b"".join(pieces).count(CHUNK))
        await ending(request, then)
        return response

    return handle


async def breaks_off(request: web.Request) -> web.StreamResponse:
    await ending(request, "abort")
    return web.Response()


async def half_a_body(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(COMPLETION[:20])
    await ending(request, "abort")
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    await ending(request, "stall")
    return web.Response()


async def ending(request: web.Request, how: str) -> None:
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


async def call_async(bad: Bad, url: str = "", stream: bool = False, timeout: float = 30.0) -> Outcome:
    waits: list[float] = []
    base, backoff = url or str(bad.server.make_url("/v1")), backoff_into(waits)
    async with AsyncClient(base, timeout=timeout, backoff=backoff) as client:
        try:
            got = await client.completions.create(model="m", prompt="a", stream=stream)
            if isinstance(got, Completion):
                bad.chunks += 1
            else:
                async for _ in got:
                    bad.chunks += 1
        except TokError as error:
            return Outcome(bad.chunks, waits, error)
    return Outcome(bad.chunks, waits)


async def call_blocking(bad: Bad, url: str = "", stream: bool = False, timeout: float = 30.0) -> Outcome:
    waits: list[float] = []
    base, backoff = url or str(bad.server.make_url("/v1")), backoff_into(waits)

    def call() -> Outcome:
        with Client(base, timeout=timeout, backoff=backoff) as client:
            try:
                got = client.completions.create(model="m", prompt="a", stream=stream)
                if isinstance(got, Completion):
                    bad.chunks += 1
                else:
                    for _ in got:
                        bad.chunks += 1
            except TokError as error:
                return Outcome(bad.chunks, waits, error)
        return Outcome(bad.chunks, waits)

    return await asyncio.to_thread(call)


def backoff_into(waits: list[float]) -> Backoff:
    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    return Backoff(sleep=sleep, uniform=lambda: 1.0)


both = pytest.mark.parametrize("call", [call_async, call_blocking])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


def good(stream: bool) -> Handler:
    return streams(CHUNK, DONE) if stream else says()


@both
@streamed_or_not
@pytest.mark.parametrize(
    ("first", "waits"),
    [
        (says(b"{}", 429, Retry_After="7"), [7.0]),
        (says(b"{}", 429), [0.5]),
        (says(b"oops", 500), [0.5]),
        (says(b"{}", 503, Retry_After="0"), [0.5]),
        (says(b"{}", 408), [0.5]),
        (says(b"{}", 409), [0.5]),
        (breaks_off, [0.5]),
    ],
)
async def test_transient_errors_are_retried(
    bad: Bad, call: Call, stream: bool, first: Handler, waits: list[float]
) -> None:
    bad.script = [first, good(stream)]
    outcome = await call(bad, stream=stream)
    assert (outcome.error, outcome.chunks, outcome.waits, bad.requests) == (None, 1, waits, 2)


@both
@streamed_or_not
async def test_after_the_last_retry_the_error_is_raised(bad: Bad, call: Call, stream: bool) -> None:
    bad.script = [says(b'{"error":{"message":"dead","type":"server_error","param":null,"code":"x"}}', 500)]
    outcome = await call(bad, stream=stream)
    assert isinstance(outcome.error, InternalServerError)
    assert (str(outcome.error), outcome.error.code) == ("500: dead", "x")
    assert (outcome.waits, bad.requests) == ([0.5, 1.0], 3)


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
    bad: Bad, call: Call, stream: bool, status: int, kind: type[APIStatusError]
) -> None:
    bad.script = [says(b"{}", status, x_request_id="r1")]
    outcome = await call(bad, stream=stream)
    assert type(outcome.error) is kind
    assert isinstance(outcome.error, APIStatusError)
    assert (outcome.error.status_code, outcome.error.request_id, bad.requests) == (status, "r1", 1)


@both
async def test_a_retry_after_longer_than_the_timeout_is_not_waited_for(bad: Bad, call: Call) -> None:
    bad.script = [says(b"{}", 429, Retry_After="31")]
    outcome = await call(bad)
    assert isinstance(outcome.error, RateLimitError)
    assert (outcome.error.retry_after, outcome.waits, bad.requests) == ("31", [], 1)


@both
async def test_a_redirect_is_raised_and_not_followed(bad: Bad, call: Call) -> None:
    bad.script = [says(b"", 307, Location="https://elsewhere/v1")]
    outcome = await call(bad)
    assert isinstance(outcome.error, APIStatusError)
    assert "https://elsewhere/v1" in str(outcome.error)
    assert bad.requests == 1


@both
async def test_a_truncated_body_is_retried_and_never_returned(bad: Bad, call: Call) -> None:
    bad.script = [half_a_body]
    outcome = await call(bad)
    assert type(outcome.error) is APIConnectionError
    assert (outcome.chunks, bad.requests) == (0, 3)


@both
@streamed_or_not
async def test_a_refused_connection_is_retried_and_raised(bad: Bad, call: Call, stream: bool) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        outcome = await call(bad, url=f"http://127.0.0.1:{held.getsockname()[1]}/v1", stream=stream)
    assert type(outcome.error) is APIConnectionError
    assert outcome.waits == [0.5, 1.0]


@both
@pytest.mark.parametrize("then", ["abort", "end"])
@pytest.mark.parametrize("rest", [b"", CHUNK[:30], b"data: [DONE]"])
async def test_a_truncated_stream_raises_after_its_chunks_without_retry(
    bad: Bad, call: Call, then: str, rest: bytes
) -> None:
    bad.script = [streams(CHUNK, CHUNK + rest, then=then)]
    outcome = await call(bad, stream=True)
    assert type(outcome.error) is APIConnectionError
    assert (outcome.chunks, bad.requests) == (2, 1)


@both
@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"died","type":"server_error","param":null,"code":"x"}}\n\n',
        b'event: error\ndata: {"message":"died","type":"server_error","code":"x"}\n\n',
    ],
)
async def test_an_error_event_is_raised_after_the_chunks_before_it(bad: Bad, call: Call, event: bytes) -> None:
    bad.script = [streams(CHUNK + event + CHUNK + DONE)]
    outcome = await call(bad, stream=True)
    assert isinstance(outcome.error, StreamError)
    assert (str(outcome.error), outcome.error.type, outcome.error.code) == ("died", "server_error", "x")
    assert (outcome.chunks, bad.requests) == (1, 1)


@both
@pytest.mark.parametrize("garbage", [b"data: {\n\n", b'data: {"id":1}\n\n', b"data: \xff\n\n", b"data: []\n\n"])
async def test_a_malformed_stream_event_raises(bad: Bad, call: Call, garbage: bytes) -> None:
    bad.script = [streams(CHUNK, garbage, DONE)]
    outcome = await call(bad, stream=True)
    assert isinstance(outcome.error, APIResponseError)
    assert (outcome.chunks, bad.requests) == (1, 1)


@both
@pytest.mark.parametrize("garbage", [b"", b"{", b"<html>", b'{"id":1}', b"\xff"])
async def test_a_malformed_completion_raises_with_its_body(bad: Bad, call: Call, garbage: bytes) -> None:
    bad.script = [says(garbage)]
    outcome = await call(bad)
    assert isinstance(outcome.error, APIResponseError)
    assert (outcome.error.body, bad.requests) == (garbage, 1)


@both
async def test_a_json_answer_to_a_streamed_request_raises(bad: Bad, call: Call) -> None:
    bad.script = [says()]
    outcome = await call(bad, stream=True)
    assert isinstance(outcome.error, APIResponseError)
    assert "application/json" in str(outcome.error)


@both
@streamed_or_not
async def test_a_silent_server_times_out_without_retry(bad: Bad, call: Call, stream: bool) -> None:
    bad.script = [silent]
    outcome = await call(bad, stream=stream, timeout=0.2)
    assert isinstance(outcome.error, APITimeoutError)
    assert isinstance(outcome.error, TimeoutError)
    assert (outcome.waits, bad.requests) == ([], 1)


@both
async def test_a_stalled_stream_times_out_after_its_chunks(bad: Bad, call: Call) -> None:
    bad.script = [streams(CHUNK, then="stall")]
    outcome = await call(bad, stream=True, timeout=0.2)
    assert isinstance(outcome.error, APITimeoutError)
    assert (outcome.chunks, bad.requests) == (1, 1)


@both
async def test_a_stream_ends_at_done_while_the_connection_stays_open(bad: Bad, call: Call) -> None:
    bad.script = [streams(CHUNK, DONE, then="stall")]
    outcome = await call(bad, stream=True)
    assert (outcome.error, outcome.chunks) == (None, 1)


async def test_a_stream_has_the_request_id_of_its_response(bad: Bad) -> None:
    bad.script = [streams(CHUNK, DONE)]
    async with (
        AsyncClient(str(bad.server.make_url("/v1"))) as client,
        await client.completions.create(model="m", prompt="a", stream=True) as stream,
    ):
        assert stream.request_id == "r1"
