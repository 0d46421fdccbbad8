"""Load tests of the demo model on a CPU: no lost requests, no leaks, and recovery from killed processes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from support import leaving_clients
from support.fuzzing import FACTOR
from support.leaving_clients import Served, served
from support.patience import PATIENCE

REQUESTS, CONCURRENCY = 300 * FACTOR, 256
KILLED = 80  # requests that are open when a process is killed
LEAVING, LEAVING_CONCURRENCY = 250 * FACTOR, 200


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One server for all tests, so that leaks of a test show in the next."""
    with served() as one:
        yield one


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        yield session


def mixed(seed: int) -> dict[str, Any]:
    """Return a random request: any length, one or more samples, streamed or not, with or without extras."""
    rng = random.Random(seed)
    most = 150 if rng.random() < 0.1 else 20  # on a CPU a long prompt takes as long as the rest of a request
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
    """Return finish reasons by choice; raise for any incomplete answer."""
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


async def settled_counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Wait until the server is idle and return its metrics."""
    deadline = time.monotonic() + PATIENCE
    while True:
        now = await metrics(session, url)
        gauges = ("requests_running", "requests_waiting", "steps_in_flight", "pages_used")
        if not any(now[f"tok_{name}"] for name in gauges):
            return now
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.05)


async def test_mixed_load_is_fully_answered_and_leaks_no_memory(http: aiohttp.ClientSession, server: Served) -> None:
    await load(http, server.url, CONCURRENCY, first_seed=10_000)
    before = await settled_counters(http, server.url)
    memory = server.memory()
    await load(http, server.url, REQUESTS, first_seed=0)
    after = await settled_counters(http, server.url)
    assert after["tok_requests_finished_total"] - before["tok_requests_finished_total"] == REQUESTS
    assert after["tok_restarts_total"] == before["tok_restarts_total"]
    assert server.memory() < memory + (64 << 20)


async def test_disconnecting_clients_affect_no_other_request(server: Served) -> None:
    warm = await leaving_clients.load(server, LEAVING_CONCURRENCY, LEAVING_CONCURRENCY, first_seed=10**6)
    memory = server.memory()
    tally = await leaving_clients.load(server, LEAVING, LEAVING_CONCURRENCY)  # returns once the server is idle
    assert set(tally.ends) <= {"whole", "left"}, tally.ends
    assert sum(tally.ends.values()) == LEAVING
    assert tally.ends["left"] > 0
    assert tally.metrics["tok_restarts_total"] == warm.metrics["tok_restarts_total"]
    assert server.memory() < memory + (64 << 20)


async def test_a_killed_process_fails_open_requests_and_the_server_recovers(
    http: aiohttp.ClientSession, server: Served
) -> None:
    body = {"prompt": "Tom has", "max_tokens": 600, "ignore_eos": True, "n": 2}
    for role in ("worker", "manager"):
        tasks = [
            asyncio.create_task(complete(http, server.url, {**body, "seed": i, "stream": i % 2 == 0}))
            for i in range(KILLED)
        ]
        async with asyncio.timeout(PATIENCE):
            while (await metrics(http, server.url))["tok_requests_running"] < KILLED / 2:
                await asyncio.sleep(0.05)
        server.child(role).kill()
        async with asyncio.timeout(PATIENCE):  # far less than --step-timeout, which would detect a dead worker, too
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, AssertionError) for result in results), results
            while (await http.get(f"{server.url}/health")).status != 200:
                await asyncio.sleep(0.05)
        assert await complete(http, server.url, {"prompt": "Tom has", "max_tokens": 4, "temperature": 0})
