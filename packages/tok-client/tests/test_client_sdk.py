"""Tests of both clients against a well-behaved server."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from support.patience import PATIENCE, until
from tok_client import (
    UNSET,
    APIConnectionError,
    AsyncClient,
    BadRequestError,
    ChatCompletion,
    ChatCompletionChunk,
    Client,
    Completion,
    NotFoundError,
)
from tok_client import types as wire

README = Path(__file__).parents[1] / "README.md"
WORDS = ["Once ", "upon ", "é€", "𝄞 ", "time."]
USAGE = wire.Usage(prompt_tokens=1, completion_tokens=5, total_tokens=6)
MODEL = wire.Model(id="org/model", created=1, owned_by="me")


class ConformingServer:
    """A server that answers every prompt with WORDS and records requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.peers: set[object] = set()
        self.disconnected = asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{id}", self.model)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/v1"))

    async def body(self, request: web.Request) -> bytes:
        content = await request.read()
        self.bodies.append(msgspec.json.decode(content))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        return content

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await self.body(request), type=wire.CompletionRequest)
        if asked.n == 0:
            error = wire.ErrorBody(message="n is 0", type="invalid_request_error", param="n")
            return answer(wire.ErrorResponse(error=error), status=400)
        count = len(asked.prompts()) * (asked.n or 1)

        def choices(text: str, end: str | None) -> list[wire.CompletionChoice]:
            return [wire.CompletionChoice(index=i, text=text, finish_reason=end) for i in range(count)]

        def part(text: str, end: str | None) -> wire.Completion:
            return wire.Completion(id="c", created=1, model="m", choices=choices(text, end))

        if asked.user == "endless":
            return await self.endless(request, part("x", None))
        if not asked.stream:
            return answer(msgspec.structs.replace(part("".join(WORDS), "stop"), usage=USAGE))
        last = msgspec.structs.replace(part("", None), choices=[], usage=USAGE)
        return await streamed(request, [*(part(word, None) for word in WORDS), part("", "stop"), last])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await self.body(request), type=wire.ChatCompletionRequest)
        if not asked.stream:
            message = wire.ChatMessage(content="".join(WORDS))
            choice = wire.ChatChoice(index=0, message=message, finish_reason="stop")
            return answer(wire.ChatCompletion(id="c", created=1, model="m", choices=[choice], usage=USAGE))
        deltas = [wire.Delta(role="assistant"), *(wire.Delta(content=word) for word in WORDS)]
        choices = [wire.ChunkChoice(index=0, delta=delta) for delta in deltas]
        chunks = [wire.ChatCompletionChunk(id="c", created=1, model="m", choices=[c]) for c in choices]
        return await streamed(request, list(chunks))

    async def models(self, request: web.Request) -> web.Response:
        return answer(wire.ModelList(data=[MODEL]))

    async def model(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != MODEL.id:
            error = wire.ErrorBody(message="no such model", type="invalid_request_error", code="model_not_found")
            return answer(wire.ErrorResponse(error=error), status=404)
        return answer(MODEL)

    async def endless(self, request: web.Request, chunk: wire.Completion) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(event(chunk))
                await asyncio.sleep(0.001)
        finally:  # reached only when the client disconnects
            self.disconnected.set()


def answer(made: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(made), status=status, content_type="application/json")


def event(made: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(made) + b"\n\n"


async def streamed(request: web.Request, chunks: list[msgspec.Struct]) -> web.StreamResponse:
    """Stream all chunks and [DONE] in writes of 50 bytes, which split events and characters."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    data = b": hello\n\n" + b"".join(map(event, chunks)) + b"data: [DONE]\n\n"
    for start in range(0, len(data), 50):
        await response.write(data[start : start + 50])
        await asyncio.sleep(0)
    return response


@pytest_asyncio.fixture
async def conforming_server() -> AsyncIterator[ConformingServer]:
    conforming_server = ConformingServer()
    async with conforming_server.server:
        yield conforming_server


async def blocking(
    function: Callable[[Client], object], conforming_server: ConformingServer, api_key: str | None = None
) -> object:
    """Call `function` with a blocking client on a thread, while the server runs on the test's loop."""

    def run() -> object:
        with Client(conforming_server.url, api_key) as client:
            return function(client)

    return await asyncio.to_thread(run)


async def test_sync_and_async_clients_return_the_same_completion(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        ours = await client.completions.create(model="m", prompt="a", n=2)
    theirs = await blocking(lambda client: client.completions.create(model="m", prompt="a", n=2), conforming_server)
    assert isinstance(ours, Completion)
    assert ours == theirs
    assert [choice.text for choice in ours.choices] == ["".join(WORDS)] * 2
    assert ours.usage == USAGE


async def test_sync_and_async_clients_return_the_same_chat_completion(conforming_server: ConformingServer) -> None:
    messages = [{"role": "user", "content": "a"}]
    async with AsyncClient(conforming_server.url) as client:
        ours = await client.chat.completions.create(model="m", messages=messages)
    theirs = await blocking(
        lambda client: client.chat.completions.create(model="m", messages=messages), conforming_server
    )
    assert isinstance(ours, ChatCompletion)
    assert ours == theirs
    assert ours.choices[0].message.content == "".join(WORDS)


async def test_only_given_parameters_are_sent(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        await client.completions.create(model="m", prompt=(1, 2))
        await client.completions.create(
            model="m",
            prompt=["a"],
            seed=None,
            top_k=UNSET,
            logit_bias={5: -1.5},
            stop=("x",),
            extra_body={"guided": True, "n": 2},
        )
    assert conforming_server.bodies == [
        {"model": "m", "prompt": [1, 2]},
        {
            "model": "m",
            "prompt": ["a"],
            "seed": None,
            "logit_bias": {"5": -1.5},
            "stop": ["x"],
            "guided": True,
            "n": 2,
        },
    ]


async def test_a_chat_answer_can_be_sent_back_as_a_message(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        question = wire.UserMessage(content=[wire.TextPart(text="a")])
        answer = await client.chat.completions.create(model="m", messages=[question])
        said = answer.choices[0].message
        await client.chat.completions.create(model="m", messages=[question, said, {"role": "user", "content": "b"}])
    assert conforming_server.bodies[1]["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "".join(WORDS), "refusal": None},
        {"role": "user", "content": "b"},
    ]


async def test_invalid_parameters_are_refused_before_sending(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        with pytest.raises(TypeError, match="colour"):
            await client.completions.create(model="m", prompt="a", colour="red")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="temperature is nan"):
            await client.completions.create(model="m", prompt="a", temperature=float("nan"))
        with pytest.raises(ValueError, match="timeout is 0"):
            await client.completions.create(model="m", prompt="a", timeout=0)
        with pytest.raises(ValueError, match="prompt mixes"):
            await client.completions.create(model="m", prompt=["a", 1])  # type: ignore[arg-type]
    assert conforming_server.bodies == []


async def test_lone_surrogates_are_refused_by_name(conforming_server: ConformingServer) -> None:
    half = "a\ud800"
    async with AsyncClient(conforming_server.url) as client:
        with pytest.raises(ValueError, match="prompt has a lone surrogate"):
            await client.completions.create(model="m", prompt=["a", half])
        with pytest.raises(ValueError, match="messages has a lone surrogate"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": half}])
        with pytest.raises(ValueError, match="zeta has a lone surrogate"):
            await client.completions.create(model="m", prompt="a", extra_body={"zeta": {"b": half}})
        with pytest.raises(ValueError, match="model has a lone surrogate"):
            await client.models.retrieve(half)
    with Client(conforming_server.url) as blocked, pytest.raises(ValueError, match="model has a lone surrogate"):
        blocked.models.retrieve(half)
    assert conforming_server.bodies == []


async def test_the_api_key_is_sent_as_a_bearer_token(conforming_server: ConformingServer) -> None:
    await blocking(lambda client: client.completions.create(model="m", prompt="a"), conforming_server)
    await blocking(lambda client: client.completions.create(model="m", prompt="a"), conforming_server, api_key="k1")
    assert [headers.get("authorization") for headers in conforming_server.headers] == [None, "Bearer k1"]
    assert conforming_server.headers[0]["content-type"] == "application/json"


async def test_models_are_listed_and_found_by_ids_with_slashes(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url + "/") as client:
        assert (await client.models.list()).data == [MODEL]
        assert await client.models.retrieve("org/model") == MODEL
        with pytest.raises(NotFoundError, match="no such model") as caught:
            await client.models.retrieve("org")
    assert caught.value.code == "model_not_found"
    assert await blocking(lambda client: client.models.list().data, conforming_server) == [MODEL]
    assert await blocking(lambda client: client.models.retrieve("org/model"), conforming_server) == MODEL


async def test_a_bad_request_error_names_the_field(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        with pytest.raises(BadRequestError, match="400: n is 0") as caught:
            await client.completions.create(model="m", prompt="a", n=0)
    assert (caught.value.param, caught.value.type) == ("n", "invalid_request_error")
    assert len(conforming_server.bodies) == 1


async def test_streamed_chunks_join_to_the_whole_completion(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        async with await client.completions.create(model="m", prompt="a", stream=True) as stream:
            ours = [chunk async for chunk in stream]
        assert stream.closed
    theirs = await blocking(
        lambda client: list(client.completions.create(model="m", prompt="a", stream=True)), conforming_server
    )
    assert ours == theirs
    assert [choice.text for chunk in ours for choice in chunk.choices] == [*WORDS, ""]
    assert (ours[-2].choices[0].finish_reason, ours[-1].usage) == ("stop", USAGE)
    assert conforming_server.bodies[0]["stream"] is True


async def test_streamed_chat_chunks_join_to_the_whole_answer(conforming_server: ConformingServer) -> None:
    def read(client: Client) -> list[ChatCompletionChunk]:
        with client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], stream=True
        ) as stream:
            return list(stream)

    async with AsyncClient(conforming_server.url) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], stream=True
        )
        ours = [chunk async for chunk in stream]
    assert ours == await blocking(read, conforming_server)
    deltas = [chunk.choices[0].delta for chunk in ours]
    assert [delta.content for delta in deltas] == [UNSET, *WORDS]
    assert deltas[0].role == "assistant"


async def test_one_connection_is_reused_by_streamed_and_whole_calls(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        for stream in (True, False, True, False):
            got = await client.completions.create(model="m", prompt="a", stream=stream)
            if not isinstance(got, Completion):
                assert len([chunk async for chunk in got]) == len(WORDS) + 2
    assert len(conforming_server.peers) == 1


async def test_closing_an_async_stream_disconnects(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        async with await client.completions.create(model="m", prompt="a", user="endless", stream=True) as stream:
            assert (await anext(stream)).choices[0].text == "x"
        await asyncio.wait_for(conforming_server.disconnected.wait(), 60)
        assert [chunk async for chunk in stream] == []


@pytest.mark.parametrize("way", ["close", "drop"])
async def test_closing_or_dropping_a_blocking_stream_disconnects(conforming_server: ConformingServer, way: str) -> None:
    closed = threading.Event()

    def read(client: Client) -> None:
        stream = client.completions.create(model="m", prompt="a", user="endless", stream=True)
        assert next(stream).choices[0].text == "x"
        if way == "close":
            stream.close()
            assert list(stream) == []
        del stream
        assert closed.wait(PATIENCE)  # keep the client open until the server has seen the disconnect

    reading = asyncio.ensure_future(blocking(read, conforming_server))
    await asyncio.wait_for(conforming_server.disconnected.wait(), 60)
    closed.set()
    await reading


async def test_one_blocking_client_serves_many_threads(conforming_server: ConformingServer) -> None:
    with Client(conforming_server.url) as client:

        def call(number: int) -> str:
            stream = client.completions.create(model="m", prompt=[number], stream=True)
            return "".join(choice.text for chunk in stream for choice in chunk.choices)

        texts = await asyncio.gather(*(asyncio.to_thread(call, number) for number in range(64)))
    assert texts == ["".join(WORDS)] * 64
    assert sorted(body["prompt"][0] for body in conforming_server.bodies) == list(range(64))  # type: ignore[index]


async def test_closing_the_client_ends_an_open_call(conforming_server: ConformingServer) -> None:
    client = Client(conforming_server.url)

    def call() -> None:
        for _ in client.completions.create(model="m", prompt="a", user="endless", stream=True):
            pass

    calling = asyncio.ensure_future(asyncio.to_thread(call))
    await until(lambda: len(conforming_server.bodies) == 1)
    await asyncio.to_thread(client.close)
    with pytest.raises(RuntimeError, match="closed"):
        await calling
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.models.list()
    client.close()


async def test_a_closed_async_client_refuses_calls(conforming_server: ConformingServer) -> None:
    client = AsyncClient(conforming_server.url)
    await client.models.list()
    await client.close()
    await client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.models.list()


async def test_a_stream_of_a_closed_client_raises_instead_of_ending(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        stream = await client.completions.create(model="m", prompt="a", user="endless", stream=True)
        await anext(stream)
    with pytest.raises(APIConnectionError, match="the client was closed"):
        async for _ in stream:
            pass

    def read() -> None:
        client = Client(conforming_server.url)
        with client.completions.create(model="m", prompt="a", user="endless", stream=True) as stream:
            client.close()
            for _ in stream:
                pass

    with pytest.raises(RuntimeError, match="the client is closed"):
        await asyncio.to_thread(read)


async def test_an_async_client_refuses_another_event_loop(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        await client.models.list()
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(client.models.list()))


async def test_a_dropped_client_ends_its_thread_after_its_streams(conforming_server: ConformingServer) -> None:
    def threads() -> int:
        return sum(thread.name == "tok-client" for thread in threading.enumerate())

    def read() -> list[Completion]:
        return list(Client(conforming_server.url).completions.create(model="m", prompt="a", stream=True))

    before = threads()
    assert len(await asyncio.to_thread(read)) == len(WORDS) + 2
    await until(lambda: threads() == before)


async def test_interrupting_a_blocking_call_disconnects(conforming_server: ConformingServer) -> None:
    code = (
        "import signal, sys\n"
        "from tok_client import Client\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs inherit an ignored SIGINT
        "client = Client(sys.argv[1])\n"
        "try: client.completions.create(model='m', prompt='a', user='endless')\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
        "sys.stdin.read()\n"  # keep the client open: the call itself must disconnect
    )
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, conforming_server.url, stdin=pipe, stdout=pipe
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        await until(lambda: len(conforming_server.bodies) == 1)
        child.send_signal(signal.SIGINT)
        await asyncio.wait_for(conforming_server.disconnected.wait(), 60)
        child.stdin.close()
        shown = await asyncio.wait_for(child.stdout.read(), 60)
        assert (shown, await child.wait()) == (b"interrupted\n", 0)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def test_a_client_used_after_a_fork_raises() -> None:
    code = (
        "import os\n"
        "from tok_client import APIConnectionError, Client\n"
        "client = Client('http://127.0.0.1:1/v1', max_retries=0)\n"
        "try: client.models.list()\n"
        "except APIConnectionError: pass\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try: client.models.list()\n"
        "    except RuntimeError as error: os._exit(7 if 'forked' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert shown.stdout == "7\n"


async def test_a_forked_process_that_exits_leaves_its_parents_connections_open(
    conforming_server: ConformingServer,
) -> None:
    code = (
        "import os, sys\n"
        "from tok_client import Client\n"
        "client = Client(sys.argv[1], timeout=20, max_retries=0)\n"
        "client.models.list()\n"
        "if not os.fork(): sys.exit()\n"
        "os.wait()\n"
        "print(client.completions.create(model='m', prompt='a').choices[0].finish_reason)\n"
    )
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, conforming_server.url, stdout=pipe, stderr=pipe
    )
    assert await asyncio.wait_for(child.communicate(), PATIENCE) == (b"stop\n", b"")


async def test_a_dropped_async_stream_disconnects(conforming_server: ConformingServer) -> None:
    async with AsyncClient(conforming_server.url) as client:
        async for _ in await client.completions.create(model="m", prompt="a", user="endless", stream=True):
            break
        await asyncio.wait_for(conforming_server.disconnected.wait(), PATIENCE)


SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


async def test_readme_snippets_print_the_answers_of_the_server(
    conforming_server: ConformingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for snippet in SNIPPETS[:3]:
        code = snippet.replace("http://127.0.0.1:10210/v1", conforming_server.url)
        await asyncio.to_thread(exec, compile(code, str(README), "exec"), {"__name__": "snippet"})
    whole = "".join(WORDS)
    assert capsys.readouterr().out == f"{whole}\n" * 4 + whole
