"""The demo model under load on a CPU: nothing lost, nothing kept, and deaths of processes told and survived."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import psutil
import pytest

from support.own_memory import own_memory

REQUESTS = 2000
CONCURRENCY = 256


class Served:
    """A `tok serve` of the demo model and its address."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", popen.stdout.readline())
        assert found is not None
        self.popen, self.url = popen, found[0]

    def processes(self) -> list[psutil.Process]:
        one = psutil.Process(self.popen.pid)
        return [one, *one.children(recursive=True)]

    def memory(self) -> int:
        """Bytes that all its processes hold for themselves."""
        return own_memory(self.popen.pid)

    def child(self, role: str) -> psutil.Process:
        """The worker holds the model and torch, and so by far the most; the manager is the other child."""
        children = sorted(self.processes()[1:], key=lambda child: child.memory_info().rss)
        return children[-1] if role == "worker" else children[0]


@contextmanager
def served() -> Iterator[Served]:
    arguments = ["serve", "--port", "0", "--device", "cpu", "--log-level", "error"]
    command = [sys.executable, "-m", "tok_server.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield Served(popen)
        finally:
            popen.terminate()
            assert popen.wait(60) == 0


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        yield session


def mixed(seed: int) -> dict[str, Any]:
    """A request of any length, alone or with samples, streamed or not, with or without extras."""
    rng = random.Random(seed)
    most = 150 if rng.random() < 0.1 else 20  # a long prompt takes a CPU as long as all else about a request
    words = rng.choices(["Tom", "has", "12", "apples", "and", "buys", "more."], k=rng.randint(1, most))
    body: dict[str, Any] = {"prompt": " ".join(words), "max_tokens": rng.choice([1, 2, 8, 16, 32, 64]), "seed": seed}
    body["temperature"] = rng.choice([0, 0.7, 1.0])
    body["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.1:
        body["n"] = rng.randint(2, 4)
    if rng.random() < 0.2:
        body["stream"] = True
    if rng.random() < 0.2:
        body["stop"] = [rng.choice(["####", "apples", "\n"])]
    if rng.random() < 0.1:
        body["logprobs"] = 2
    return body


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[int, str]:
    """Finish reasons by choice; raises for anything but a whole answer."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            return {choice["index"]: choice["finish_reason"] for choice in (await response.json())["choices"]}
        ends: dict[int, str] = {}
        lines = (await response.text()).split("\n\n")
        assert lines[-2] == "data: [DONE]", lines[-3:]
        for line in lines[:-2]:
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if choice["finish_reason"] is not None:
                    ends[choice["index"]] = choice["finish_reason"]
        return ends


async def load(session: aiohttp.ClientSession, url: str, count: int, first_seed: int) -> None:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(seed: int) -> None:
        async with gate:
            body = mixed(seed)
            ends = await complete(session, url, body)
            assert sorted(ends) == list(range(body.get("n", 1)))
            assert set(ends.values()) <= {"stop", "length"}

    await asyncio.gather(*(one(first_seed + i) for i in range(count)))


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}


async def settled(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The metrics once nothing runs any more."""
    deadline = time.monotonic() + 60
    while True:
        now = await metrics(session, url)
        gauges = ("requests_running", "requests_waiting", "steps_in_flight", "pages_used")
        if not any(now[f"tok_{name}"] for name in gauges):
            return now
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.05)


async def test_two_thousand_mixed_requests_are_all_answered_and_leave_nothing_behind(
    http: aiohttp.ClientSession,
) -> None:
    with served() as server:
        await load(http, server.url, CONCURRENCY, first_seed=10_000)
        before = await settled(http, server.url)
        memory = server.memory()
        await load(http, server.url, REQUESTS, first_seed=0)
        after = await settled(http, server.url)
        assert after["tok_requests_finished_total"] - before["tok_requests_finished_total"] == REQUESTS
        assert after["tok_restarts_total"] == 0
        assert server.memory() < memory + (64 << 20)


async def test_killed_under_load_every_request_ends_at_once_and_service_returns(http: aiohttp.ClientSession) -> None:
    body = {"prompt": "Tom has", "max_tokens": 600, "ignore_eos": True, "n": 2}
    with served() as server:
        for role in ("worker", "manager"):
            tasks = [
                asyncio.create_task(complete(http, server.url, {**body, "seed": i, "stream": i % 2 == 0}))
                for i in range(CONCURRENCY)
            ]
            while (await metrics(http, server.url))["tok_requests_running"] < 64:
                await asyncio.sleep(0.05)
            server.child(role).kill()
            killed = time.monotonic()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - killed < 5
            assert all(isinstance(result, AssertionError) for result in results), results
            while (await http.get(f"{server.url}/health")).status != 200:
                assert time.monotonic() - killed < 120
                await asyncio.sleep(0.05)
            assert await complete(http, server.url, {"prompt": "Tom has", "max_tokens": 4, "temperature": 0})
