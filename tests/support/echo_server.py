"""A server for tests of `map`: answers each prompt in capitals, counts requests, waits, and injects faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from support.patience import PATIENCE, until
from tok_client import AsyncClient, Backoff
from tok_client import types as wire

FAST = Backoff(first=0.001, most=0.002)


class EchoServer:
    """A server that answers each prompt in capitals and counts requests."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.open = self.most_open = 0
        self.gate: Callable[[str], bool] = lambda prompt: True  # an answer waits until this returns True
        self.fault: Callable[[str, int], str | None] = lambda prompt, tries: None
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", self.completion)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/embeddings", self.embedding)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/v1"))

    def client(self) -> AsyncClient:
        return AsyncClient(self.url, backoff=FAST, timeout=PATIENCE)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=wire.CompletionRequest)
        (prompt,) = map(str, asked.prompts())
        made = wire.Completion(
            id="c", created=1, model="m", choices=[wire.CompletionChoice(index=0, text=prompt.upper())]
        )
        return await self.answer(request, prompt, made)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=wire.ChatCompletionRequest)
        prompt = str(asked.messages[-1].content)
        message = wire.ChatMessage(content=prompt.upper())
        made = wire.ChatCompletion(id="c", created=1, model="m", choices=[wire.ChatChoice(index=0, message=message)])
        return await self.answer(request, prompt, made)

    async def embedding(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=wire.EmbeddingRequest)
        (prompt,) = map(str, asked.inputs())
        made = wire.EmbeddingList(
            data=[wire.Embedding(index=0, embedding=[float(len(prompt))])],
            model="m",
            usage=wire.EmbeddingUsage(prompt_tokens=1, total_tokens=1),
        )
        return await self.answer(request, prompt, made)

    async def answer(self, request: web.Request, prompt: str, made: msgspec.Struct) -> web.StreamResponse:
        self.asked[prompt] += 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            await until(lambda: self.gate(prompt))
            return await self.spoilt(request, self.fault(prompt, self.asked[prompt]), prompt, msgspec.json.encode(made))
        finally:
            self.open -= 1

    async def spoilt(self, request: web.Request, fault: str | None, prompt: str, body: bytes) -> web.StreamResponse:
        if fault is None:
            self.answered[prompt] += 1
            return web.Response(body=body, content_type="application/json")
        if fault == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if fault == "half":
            half = web.StreamResponse(headers={"Content-Length": str(len(body))})
            await half.prepare(request)
            await half.write(body[:10])
            assert request.transport is not None
            request.transport.close()
            return half
        if fault == "garbage":
            return web.Response(body=body[:-3], content_type="text/html")
        status, _, after = fault.partition(" ")
        headers = {"Retry-After": after} if after else {}
        return web.Response(body=b'{"error":{"message":"no"}}', status=int(status), headers=headers)


def prompts(count: int) -> list[str]:
    """Return `count` different prompts."""
    return [f"prompt {number}" for number in range(count)]


async def endless() -> AsyncIterator[str]:
    """Yield different prompts without end."""
    number = 0
    while True:
        yield f"prompt {number}"
        number += 1
