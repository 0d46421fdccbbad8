"""Tests of uploads, downloads, batches, health and responses against a misbehaving server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BytesIO
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from support.patience import PATIENCE
from tok_client import (
    APIConnectionError,
    APIResponseError,
    AsyncClient,
    Backoff,
    InternalServerError,
    StreamError,
)
from tok_client import types as wire

FILE = b'{"id":"f","bytes":5,"created_at":1,"filename":"n","purpose":"batch"}'
HEALTHY = b'{"status":"draining","detail":"so","replicas":[]}'
DELTA = (
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":0,"item_id":"i",'
)
DELTA += b'"output_index":0,"content_index":0,"delta":"a","logprobs":[]}\n\n'
NEWS = b'event: response.news\ndata: {"type":"response.news"}\n\n'
LAST = b'event: response.completed\ndata: {"type":"response.completed","sequence_number":1,"response":'
LAST += b'{"id":"r","created_at":1,"status":"completed","model":"m"}}\n\n'

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UnusualServer:
    """A server that answers requests with the answers in `script` in turn, and repeats the last one."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.bodies: list[bytes] = []
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.server = TestServer(app)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        return await self.script[min(len(self.bodies), len(self.script)) - 1](request)


@pytest_asyncio.fixture
async def unusual_server() -> AsyncIterator[UnusualServer]:
    unusual_server = UnusualServer()
    async with unusual_server.server:
        yield unusual_server


@pytest_asyncio.fixture
async def client(unusual_server: UnusualServer) -> AsyncIterator[AsyncClient]:
    url = str(unusual_server.server.make_url("/v1"))
    async with AsyncClient(url, backoff=Backoff(first=0.001, most=0.001), timeout=PATIENCE) as found:
        yield found


def respond_with(body: bytes = b"", status: int = 200, kind: str = "application/json") -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, content_type=kind)

    return answer


def respond_slowly(body: bytes, kind: str = "application/json") -> Answer:
    """Return an answer that sends one byte per turn of the event loop."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for place in range(len(body)):
            await response.write(body[place : place + 1])
            await asyncio.sleep(0)
        return response

    return answer


def respond_half(body: bytes) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(2 * len(body))})
        await response.prepare(request)
        await response.write(body)
        assert request.transport is not None
        request.transport.close()
        return response

    return answer


async def drop_connection(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("as_path", [True, False])
@pytest.mark.parametrize("size", [5, 3 << 20])
async def test_an_upload_is_retried_from_its_beginning(
    unusual_server: UnusualServer, client: AsyncClient, tmp_path: Path, as_path: bool, size: int
) -> None:
    unusual_server.script = [respond_with(b"{}", 503), drop_connection, respond_with(FILE)]
    data = b"x" * size
    (path := tmp_path / "in.jsonl").write_bytes(data)
    kept = wire.ExpiresAfter(anchor="created_at", seconds=3600)
    made = await client.files.create(
        file=path if as_path else data,
        expires_after=kept if as_path else {"anchor": "created_at", "seconds": 3600},
    )
    assert (made.id, len(unusual_server.bodies)) == ("f", 3)
    for body in unusual_server.bodies:
        assert body.count(data) == 1
        assert b'name="expires_after[seconds]"\r\n' in body
        assert b"3600" in body
        assert body.index(b'name="purpose"') < body.index(b'name="file"')


async def test_a_missing_file_or_a_file_object_is_not_uploaded(
    unusual_server: UnusualServer, client: AsyncClient, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        await client.files.create(file=tmp_path / "none")
    with pytest.raises(TypeError, match="file is of the type BytesIO; allowed: the path of a file, or bytes"):
        await client.files.create(file=BytesIO(b"a"))  # type: ignore[arg-type]
    assert unusual_server.bodies == []


async def test_a_file_is_saved_whole_or_not_at_all(
    unusual_server: UnusualServer, client: AsyncClient, tmp_path: Path
) -> None:
    unusual_server.script = [respond_half(b"abc"), respond_with(b"abcabc")]
    assert await client.files.save("f", tmp_path / "out") == 6
    assert (tmp_path / "out").read_bytes() == b"abcabc"
    unusual_server.script = [respond_half(b"other")]
    with pytest.raises(APIConnectionError):
        await client.files.save("f", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"abcabc"
    unusual_server.bodies.clear()
    unusual_server.script = [respond_with(b"abc")]
    with pytest.raises(FileNotFoundError):
        await client.files.save("f", tmp_path / "none" / "out")
    assert len(unusual_server.bodies) == 1


async def test_batch_creation_is_not_retried_after_a_dropped_connection(
    unusual_server: UnusualServer, client: AsyncClient
) -> None:
    unusual_server.script = [drop_connection]
    with pytest.raises(APIConnectionError):
        await client.batches.create(input_file_id="f", endpoint="/v1/completions")
    assert len(unusual_server.bodies) == 1


async def test_health_parses_reports_and_raises_on_other_bodies(
    unusual_server: UnusualServer, client: AsyncClient
) -> None:
    unusual_server.script = [respond_with(b"")]
    assert (await client.health()).status == "ready"
    unusual_server.script = [respond_with(HEALTHY, 503)]
    assert await client.health() == wire.HealthReport(status="draining", detail="so")
    for body in (b"<h1>Service Unavailable</h1>", b""):
        unusual_server.script = [respond_with(body, 503, "text/html")]
        with pytest.raises(InternalServerError):
            await client.health()


async def test_a_slow_body_that_keeps_arriving_does_not_time_out(unusual_server: UnusualServer) -> None:
    unusual_server.script = [respond_slowly(HEALTHY + b" " * 300)]
    async with AsyncClient(str(unusual_server.server.make_url("/v1")), timeout=PATIENCE, max_retries=0) as client:
        assert (await client.health()).status == "draining"
        unusual_server.script = [respond_slowly(DELTA + LAST, "text/event-stream")]
        async with await client.responses.create(model="m", input="a", stream=True) as stream:
            assert [type(event).__name__ async for event in stream] == ["OutputTextDelta", "ResponseCompleted"]


async def test_a_responses_stream_ends_at_response_completed(
    unusual_server: UnusualServer, client: AsyncClient
) -> None:
    for rest in (b"", b"data: [DONE]\n\n", b": bye\n\n"):
        unusual_server.script = [respond_with(DELTA + NEWS + LAST + rest, kind="text/event-stream")]
        async with await client.responses.create(model="m", input="a", stream=True) as stream:
            assert [type(event).__name__ async for event in stream] == ["OutputTextDelta", "ResponseCompleted"]


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (DELTA, APIConnectionError),
        (DELTA + LAST[:-20], APIConnectionError),
        (DELTA + b"event: response.output_text.delta\ndata: {}\n\n" + LAST, APIResponseError),
        (DELTA + b"data: {\n\n" + LAST, APIResponseError),
        (DELTA + b'event: error\ndata: {"type":"error","message":"died"}\n\n', StreamError),
    ],
)
async def test_a_broken_responses_stream_raises_after_its_events(
    unusual_server: UnusualServer, client: AsyncClient, events: bytes, error: type[Exception]
) -> None:
    unusual_server.script = [respond_with(events, kind="text/event-stream")]
    stream = await client.responses.create(model="m", input="a", stream=True)
    assert isinstance(await anext(stream), wire.OutputTextDelta)
    with pytest.raises(error):
        await anext(stream)


async def test_a_large_body_is_sent_without_a_warning(unusual_server: UnusualServer, client: AsyncClient) -> None:
    unusual_server.script = [drop_connection, respond_with(b'{"id":"c","created":1,"model":"m","choices":[]}')]
    await client.completions.create(model="m", prompt="x" * (3 << 20))
    assert [len(body) > 3 << 20 for body in unusual_server.bodies] == [True, True]


SEARCH = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "tok"}}
REFUSAL = {"type": "refusal", "refusal": "No."}
REFUSED = {"type": "message", "id": "r", "status": "completed", "role": "assistant", "content": [REFUSAL]}
SAID = wire.OutputMessage(id="s", status="completed", content=[wire.OutputText(text="Yes.")])
MIXED = {
    "id": "resp", "created_at": 1, "model": "m", "status": "completed",
    "output": [SEARCH, msgspec.to_builtins(SAID), REFUSED],
}  # fmt: skip


async def test_unknown_response_items_are_kept_as_they_were_sent(
    unusual_server: UnusualServer, client: AsyncClient
) -> None:
    unusual_server.script = [respond_with(msgspec.json.encode(MIXED))]
    response = await client.responses.create(model="m", input="a")
    assert response.output == [SEARCH, SAID, REFUSED]
    await client.responses.create(model="m", input=[*response.output, {"role": "user", "content": "b"}])
    assert msgspec.json.decode(unusual_server.bodies[-1])["input"][:3] == MIXED["output"]
    place = {"output_index": 0, "sequence_number": 1}
    events: list[dict[str, object]] = [
        {"type": "response.created", "sequence_number": 0, "response": {**MIXED, "output": []}},
        {"type": "response.output_item.added", **place, "item": SEARCH},
        {"type": "response.content_part.added", **place, "item_id": "r", "content_index": 0, "part": REFUSAL},
        {"type": "response.completed", "sequence_number": 2, "response": MIXED},
    ]
    written = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
    unusual_server.script = [respond_with(written, kind="text/event-stream")]
    _, added, part, last = [event async for event in await client.responses.create(model="m", input="a", stream=True)]
    assert (added.item, part.part, last.response) == (SEARCH, REFUSAL, response)  # type: ignore[union-attr]


@pytest.mark.parametrize("output", [None, {}, ["text"], [[]], [None]])
async def test_a_response_with_malformed_output_items_raises(
    unusual_server: UnusualServer, client: AsyncClient, output: object
) -> None:
    unusual_server.script = [respond_with(msgspec.json.encode({**MIXED, "output": output}))]
    with pytest.raises(APIResponseError):
        await client.responses.create(model="m", input="a")
