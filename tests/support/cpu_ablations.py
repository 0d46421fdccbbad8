"""Measure CPU time with a mechanism taken away: `PYTHONPATH=tests python -m support.cpu_ablations chat_template`."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

import msgspec
import numpy as np
from aiohttp import web
from jinja2.sandbox import ImmutableSandboxedEnvironment

from support.ablations import compare
from support.own_memory import own_memory
from support.schemas import tokens_of
from support.tiny_tokenizer import CHAT_TEMPLATE
from tok_core import Delta, RequestStream, SamplingParams
from tok_core.grammar import loader, matchers
from tok_core.grammar.masks import Mask, MaskCache
from tok_core.manager.sequences import sparse_zeros
from tok_core.messages import Int32
from tok_core.replicas import Router, router
from tok_core.replicas.prefix_affinity import PrefixAffinity
from tok_core.replicas.replica_load import ReplicaLoad
from tok_core.sampling_params import Grammar
from tok_core.text import ChatTemplate, template
from tok_server.http import event_loop

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiled

REPEATS = 21


def cpu_us(action: Callable[[], object], calls: int) -> str:
    """Return the median CPU time of a call, of REPEATS series of `calls`."""
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(calls):
            action()
        found.append((time.process_time() - began) / calls)
    return f"{1e6 * statistics.median(found):.2f} us"


def chat_template() -> None:
    """Render chats of 3 and 200 messages; then without limits, in Jinja's sandbox alone."""
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for count in (3, 200):
        chat = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " + "word " * 40} for i in range(count)]

        def run(chat: list[dict[str, str]] = chat) -> str:
            return cpu_us(partial(ChatTemplate({"default": CHAT_TEMPLATE}, {"bos_token": ""}).render, chat), 40)

        compare(f"{count} messages", run, sandbox=(template, "_environment", lambda: plain))


def conversations() -> str:
    """Route 8 turns of each of 200 conversations to 4 replicas, 64 requests at a time; return the cached share."""
    rng, routes, cached, total = np.random.default_rng(0), Router(4, 16), 0, 0
    turns: list[Int32] = [rng.integers(0, 50_000, 400, np.int32) for _ in range(200)]
    caches: list[dict[int, int]] = [{} for _ in range(4)]  # cached tokens, by replica and conversation
    order = rng.permutation(np.repeat(np.arange(200), 8)).tolist()
    for rid, which in enumerate(order):
        asked = routes.routing_request(rid, turns[which], SamplingParams(max_tokens=200, ignore_eos=True), 10_000)
        ((replica, _),) = routes.assign(asked, range(1), range(4), split=False)
        cached, total = cached + caches[replica].get(which, 0), total + len(turns[which])
        caches[replica][which] = len(turns[which])
        turns[which] = np.concatenate((turns[which], rng.integers(0, 50_000, 300, np.int32)))
        for one in range(4):
            routes.remove(one, rid - 64)
    return f"{cached / total:.1%} of {total:,} prompt tokens cached"


def loads(requests: int, n: int, spread: float) -> str:
    """Route requests of log-normal lengths to 4 replicas at once; return the largest share of the work."""
    rng, routes, work = np.random.default_rng(0), Router(4, 16), np.zeros(4)
    for rid in range(requests):
        prompt, output = np.clip(rng.lognormal(np.log([300, 200]), spread), 16, 8000).astype(int).tolist()
        params = SamplingParams(n=n, max_tokens=output, ignore_eos=True)
        asked = routes.routing_request(rid, rng.integers(0, 50_000, prompt, np.int32), params, 10_000)
        for replica, samples in routes.assign(asked, range(n), range(4), split=True):
            work[replica] += prompt + len(samples) * output
    return f"the busiest replica has {work.max() / work.mean():.2f} times the mean work"


def routing() -> None:
    """Route without prefixes; by the number of requests; without splitting a request."""
    compare("conversations", conversations, prefixes=(PrefixAffinity, "find", lambda *_: iter(())))
    add = ReplicaLoad.add
    tokens = (ReplicaLoad, "add", lambda load, rid, prompt, samples, each: add(load, rid, 0, 1, 1))
    compare("400 requests", partial(loads, 400, 1, 1.3), tokens=tokens)
    compare("1 of 1,024", partial(loads, 1, 1024, 0.0), splits=(router, "_overloads", lambda *_: False))


def follow_answers(compiled: Compiled, end: int) -> str:
    """Follow 200 random answers to their ends."""
    rng, allowed = random.Random(0), dict[bytes, list[int]]()
    one, cache, known = matchers.Matchers(compiled), MaskCache(compiled.begin), list[Mask]()
    steps = tokens = size = cpu = 0.0
    for sequence in range(200):
        key = cache.of(compiled.first).key
        while True:
            token = rng.choice(allowed.setdefault(key, []) or allowed[key] + tokens_of(np.frombuffer(key, np.int32)))
            steps, tokens = steps + 1, tokens + 1
            if token == end:
                break
            began = time.process_time()
            sent = msgspec.msgpack.encode(one.answer([one.follow(matchers.FollowRequest(sequence, [token], 500))]))
            answer = msgspec.msgpack.decode(sent, type=matchers.MatcherReply)
            known += [cache.of(np.frombuffer(words, np.int32)) for words in answer.masks]
            cpu += time.process_time() - began
            (found,) = answer.followed
            steps, tokens = steps + len(found.given), tokens + len(found.given) + len(found.run)
            key, size = known[found.mask].key, size + len(sent)
    return f"{steps / 200:.1f} steps an answer; a token: {1e6 * cpu / tokens:.1f} us, {size / tokens:.0f} bytes"


def follow_text(compiled: Compiled, tokens: list[int]) -> str:
    """Follow 50 sequences of free text."""
    one, rng = matchers.Matchers(compiled), random.Random(0)
    return cpu_us(lambda: one.follow(matchers.FollowRequest(rng.randrange(50), [rng.choice(tokens)], 4000)), 500)


def grammar(model: str) -> None:
    """Follow answers of a schema without runs of forced tokens, and without numbers; then free text.

    model  directory with a tokenizer
    """
    from tok_core.text import Tokenizer

    tokenizer = Tokenizer.load(model)
    size, end = len(tokenizer.pieces), next(iter(tokenizer.special_ids))
    compiler = loader(model, size, [end], tokenizer)()
    text, place = {"type": "string", "maxLength": 12}, {"enum": ["Paris", "London", "Berlin"]}
    properties = {"name": text, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email": text, "city": place}
    closed = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    schema = compiler.compile(Grammar(kind="json_schema", value=msgspec.json.encode(closed).decode()))
    runs, numbers = (matchers, "MIN_RUN", 1 << 40), (matchers, "MAX_KNOWN_MASKS", 0)
    compare("a schema", partial(follow_answers, schema, end), runs=runs, numbers=numbers)
    free = compiler.compile(Grammar(kind="regex", value="[a-z ]*"))
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" hello", "the", " dog", "a")]
    of_many, settled = MaskCache.of_many, matchers.Matchers._settled
    guess = (MaskCache, "of_many", lambda masks, words, _: of_many(masks, words, [None] * len(words)))
    alike = (matchers.Matchers, "_settled", lambda one, at, mask: settled(one, at, mask._replace(alike=True)))
    compare("free text", partial(follow_text, free, words), guess=guess, alike=alike)


def tables() -> None:
    """Fill 1,000 tokens of each row of the table of 8,192 sequences of at most 131,072 tokens."""
    for name, zeros in (("sparse_zeros", sparse_zeros), ("np.zeros", lambda shape: np.zeros(shape, np.int32))):
        before, began = own_memory(os.getpid()), time.process_time()
        table = zeros((8192, 131_072))
        table[:, :1000] = 1
        print(f"{name}: {own_memory(os.getpid()) - before >> 20} MiB, {time.process_time() - began:.2f} s")


def imports() -> None:
    """Import the grammar compiler in a process of its own, with the stubs and without them."""
    code = """
import time; from support.own_memory import own_memory; from tok_core.grammar.xgrammar_imports import preload
import os, psutil, tok_core.grammar; began, before = time.process_time(), psutil.Process().memory_info().rss
{}; import tok_core.grammar.compiler
print(time.process_time() - began, psutil.Process().memory_info().rss - before >> 20)
"""
    for name, first in (("with", "preload()"), ("without", "pass")):
        runs = [subprocess.check_output([sys.executable, "-c", code.format(first)], text=True) for _ in range(10)]
        seconds, size = np.median([list(map(float, run.split())) for run in runs], axis=0)
        print(f"{name}: {seconds:.2f} s, {size:.0f} MiB")


def events() -> None:
    """Encode the events of a streamed chat, with and without `TextEvent`."""
    from tok_server.openai.chat.serializer import ChatSerializer
    from tok_server.openai.generation import GenerationJob, TokenTexts

    job = GenerationJob(
        id="a", created=1, model="tiny", prompts=[[1]], params=SamplingParams(), stream=True, include_usage=False,
        return_token_ids=False,
    )  # fmt: skip
    for name in ("with", "without"):
        serializer, delta = ChatSerializer(job, TokenTexts(None)), Delta(0, [7], " token")
        serializer.encode_delta(0, delta)
        if name == "without":
            serializer._text_events.clear()
        print(name, cpu_us(partial(serializer.encode_delta, 0, delta), 2000))


async def read(stream: RequestStream) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


async def generate(*, stream: bool) -> str:
    """Generate 128 tokens of 2,048 samples with a simulated worker; return the engine's CPU time a token."""
    from tok_server.bench.server.simulated_engine import SimulatedEngine
    from tok_server.flags import DEMO_MODEL

    engine, params = SimulatedEngine(str(DEMO_MODEL), 8192), SamplingParams(n=64, max_tokens=128, ignore_eos=True)
    await engine.start()
    began = time.process_time()
    await asyncio.gather(*(read(engine.generate([1, 2, 3], params, stream=stream)) for _ in range(32)))
    spent = time.process_time() - began
    await engine.close()
    return f"{1e6 * spent / (32 * 64 * 128):.2f} us a token"


def unstreamed() -> None:
    """Keep tokens in the token store until their samples end; then notify of each token."""
    for stream in (False, True):
        print(f"stream={stream}", *(asyncio.run(generate(stream=stream)) for _ in range(5)))


def server(case: str) -> None:
    """Serve `tok bench server --scenario whole`, as it is, or without one mechanism."""
    from tok_server.bench.server.server import run_server
    from tok_server.openai.generation import answers

    cases: dict[str, tuple[object, str, object]] = {
        "as_it_is": (os, "name", os.name),
        "freeze_gc_heap": (event_loop, "freeze_gc_heap", lambda: None),
        "uvloop": (event_loop, "new_event_loop", asyncio.new_event_loop),
        "on_loop": (answers, "MAX_LOOP_BYTES", -1),
    }
    with mock.patch.object(*cases[case]):
        (result,) = event_loop.run(run_server(["whole"], 1, 5.0, 1000.0))
    print(f"{case}: {1e6 * result.server_cpu / result.requests_per_s:.0f} us of the server's CPU a request")


def send_together(port: int, count: int) -> None:
    """Send a request over each of `count` connections at once, three times, and wait for the answers."""
    body = b'{"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for _ in range(3):
        for one in connections:
            one.sendall(head.encode() + body)
        for one in connections:
            one.recv(1 << 16)


async def lag_of_burst(count: int) -> float:
    """Return the longest delay of a server's event loop in seconds during such bursts."""
    from support.loop_lag import LoopLag
    from tok_server import Settings, make_app
    from tok_server.bench.server.simulated_engine import SimulatedEngine
    from tok_server.flags import DEMO_MODEL
    from tok_server.http import CONTEXT, accept_connections, shorten_pauses
    from tok_server.serve import listen

    engine, lag = SimulatedEngine(str(DEMO_MODEL), 8192, step_seconds=0.005), LoopLag()
    await engine.start()
    runner, listener = web.AppRunner(make_app(engine, Settings(model_name="demo"))), listen("127.0.0.1", 0)
    await runner.setup()
    async with accept_connections(runner, runner.app[CONTEXT], listener, None):
        shorten_pauses()
        arguments = listener.getsockname()[1], count
        client = multiprocessing.get_context("spawn").Process(target=send_together, args=arguments)
        client.start()
        looking = asyncio.create_task(lag.look())
        await asyncio.to_thread(client.join)
        looking.cancel()
    await runner.cleanup()
    await engine.close()
    return lag.max_sequence_tokens


def burst() -> None:
    """Send 256 and 2,000 requests at once, with and without `LoopThrottle`."""
    from tok_server.http.request_limits import LoopThrottle

    async def at_once(throttle: LoopThrottle) -> None: ...

    for count in (256, 2000):
        late = partial(lambda count: f"{1e3 * event_loop.run(lag_of_burst(count)):.0f} ms late", count)
        compare(f"{count} requests", late, without=(LoopThrottle, "admit", at_once))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
