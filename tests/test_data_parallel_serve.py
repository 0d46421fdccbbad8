"""Test of `tok serve --dp 2` while processes of one replica are killed: the other replica takes over its requests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from support.patience import PATIENCE, until
from support.paused_engine import stopped
from support.tiny_models import make_model

STREAMS = 12
WHOLE = 12
TOKENS, LONG = 150, 900
READY = re.compile(r"tok is ready: tiny \(float32 on cpu, 2 replicas\) at (http://127\.0\.0\.1:\d+)/v1\n")


@contextmanager
def served(model: Path) -> Iterator[tuple[str, psutil.Process]]:
    flags = ["--port", "0", "--device", "cpu", "--dp", "2", "--kv-cache-tokens", "65536", "--log-level", "error"]
    command = [sys.executable, "-m", "tok_server.cli", "serve", str(model), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as popen:
        try:
            assert popen.stdout is not None
            line = popen.stdout.readline()
            found = READY.fullmatch(line)
            assert found, line
            yield found[1], psutil.Process(popen.pid)
        finally:
            popen.terminate()
            assert popen.wait(PATIENCE) == 0


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    limits = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        yield session


def body(seed: int, **more: object) -> dict[str, object]:
    return {"prompt": [seed, 7, 9], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, **more}


async def whole(session: aiohttp.ClientSession, url: str, seed: int) -> tuple[int, str]:
    async with session.post(f"{url}/v1/completions", json=body(seed)) as response:
        return response.status, await response.text()


class Stream:
    """A long stream that counts its events."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self.events = 0
        self.task = asyncio.create_task(self._read(session, url, body(seed, stream=True, max_tokens=LONG)))

    async def _read(self, session: aiohttp.ClientSession, url: str, asked: dict[str, object]) -> str:
        last = ""
        async with session.post(f"{url}/v1/completions", json=asked) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: "):
                    self.events += 1
                    last = line.decode().removeprefix("data: ").rstrip("\n")
        return last


async def health(session: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, Any]]:
    async with session.get(f"{url}/health") as response:
        return response.status, await response.json()


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}


def processes(server: psutil.Process) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return managers and workers, told apart by memory: workers hold the model and torch."""
    children = sorted(server.children(), key=lambda child: child.memory_info().rss)
    assert len(children) == 4
    return children[:2], children[2:]


async def test_a_killed_replica_fails_only_its_begun_streams_and_restarts(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    model = make_model("llama", tmp_path / "tiny")
    with served(model) as (url, server):
        assert (await health(http, url))[1]["replicas"] == [{"state": "ready", "detail": ""}] * 2
        _, expected = await whole(http, url, 0)
        for times, role in enumerate(("worker", "manager"), 1):
            streams = [Stream(http, url, i) for i in range(STREAMS)]
            await until(lambda streams=streams: all(one.events for one in streams))  # type: ignore[misc]
            managers, workers = processes(server)
            with stopped(*workers):  # so that no request ends before the kill
                wholes = [asyncio.create_task(whole(http, url, i)) for i in range(WHOLE)]
                async with asyncio.timeout(PATIENCE):
                    while await open_requests(http, url) < STREAMS + WHOLE:
                        await asyncio.sleep(0.05)
                (workers if role == "worker" else managers)[0].kill()
                async with asyncio.timeout(PATIENCE):
                    while len((found := await health(http, url))[1]["detail"]) == 0:
                        await asyncio.sleep(0.05)
            assert found[0] == 200
            assert sorted(one["state"] for one in found[1]["replicas"]) == ["ready", "restarting"]
            assert f"the {role} process was killed by signal 9" in found[1]["detail"]

            answers = await asyncio.gather(*wholes)
            assert [status for status, _ in answers] == [200] * WHOLE
            assert json.loads(answers[0][1])["choices"] == json.loads(expected)["choices"]
            ends = await asyncio.gather(*(one.task for one in streams))
            failed = [last for last in ends if last != "[DONE]"]
            assert 0 < len(failed) < STREAMS
            assert {json.loads(last)["error"]["code"] for last in failed} == {"engine_unavailable"}

            async with asyncio.timeout(PATIENCE):
                while (found := await health(http, url))[1]["detail"]:
                    assert found[0] == 200
                    assert (await whole(http, url, 0))[0] == 200
            assert (await metrics(http, url))["tok_restarts_total"] == times

        await asyncio.gather(*(whole(http, url, i) for i in range(WHOLE)))
        counted = await metrics(http, url)
        for number in range(2):
            assert counted[f'tok_replica_ready{{replica="{number}"}}'] == 1
            assert counted[f'tok_replica_output_tokens_total{{replica="{number}"}}'] > TOKENS


async def open_requests(session: aiohttp.ClientSession, url: str) -> float:
    found = await metrics(session, url)
    return found["tok_requests_running"] + found["tok_requests_waiting"]
