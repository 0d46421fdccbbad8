"""Load a server with requests of every kind, disconnect a tenth of the clients at random, and look for leaks.

`PYTHONPATH=tests python -m support.leaving_clients 24000 4096` sends 24 000 requests, 4 096 at a time, to a server of
the demo model. It prints how they ended, and the server's memory after every tenth of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from support.own_memory import own_memory
from support.patience import PATIENCE

LEAVING = 0.1
GAUGES = ("requests_running", "requests_waiting", "steps_in_flight", "pages_used", "sequences_running")


@dataclass
class Tally:
    """How requests ended, and the server's private memory in bytes over time."""

    ends: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Served:
    """A `tok serve` of the demo model."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", popen.stdout.readline())
        assert found is not None
        self.url, self.port, self.pid = found[0], int(found[1]), popen.pid

    def memory(self) -> int:
        """Return the private memory of the server's processes in bytes."""
        return own_memory(self.pid)

    def child(self, role: str) -> psutil.Process:
        """Return the worker, which holds the most memory because of torch and the model, or the manager."""
        children = psutil.Process(self.pid).children(recursive=True)
        children.sort(key=lambda child: child.memory_info().rss)
        return children[-1] if role == "worker" else children[0]


@contextmanager
def served(*flags: str) -> Iterator[Served]:
    """Run a server of the demo model while the context lasts."""
    command = [sys.executable, "-m", "tok_server.cli", "serve", "--port", "0", "--device", "cpu", *flags]
    with subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield Served(popen)
        finally:
            popen.terminate()
            assert popen.wait(PATIENCE) == 0


def asked(seed: int) -> dict[str, object]:
    """Return a random request: any length, one or more samples, streamed or not."""
    rng = random.Random(seed)
    words = rng.choices(["Tom", "has", "12", "apples", "and", "buys", "more."], k=rng.randint(1, 60))
    body: dict[str, object] = {"prompt": " ".join(words), "seed": seed, "ignore_eos": rng.random() < 0.5}
    body |= {"max_tokens": rng.choice([1, 2, 4, 8, 16]), "temperature": rng.choice([0, 1.0])}
    body |= {"n": rng.choice([1] * 9 + [3]), "stream": rng.random() < 0.3}
    return body


async def request(port: int, seed: int) -> str:
    """Send a request and return how it ended: "whole", "left", or its error."""
    rng = random.Random(~seed)
    body = asked(seed)
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        if rng.random() < LEAVING:
            try:
                async with asyncio.timeout(rng.expovariate(1.0)):
                    await reader.read()
            except TimeoutError:
                return "left"
            return "whole"
        return _judged(await reader.read(), body)
    except ConnectionError as error:
        return type(error).__name__
    finally:
        writer.close()


def _judged(answer: bytes, body: dict[str, object]) -> str:
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        return head[:40].decode(errors="replace") or "nothing"
    if body["stream"]:
        return "whole" if b"data: [DONE]" in rest else "cut short"
    choices = json.loads(rest)["choices"]
    good = [one["index"] for one in choices] == list(range(len(choices))) and len(choices) == body["n"]
    return "whole" if good else "wrong"


async def load(server: Served, count: int, concurrency: int, first_seed: int = 0) -> Tally:
    """Send `count` requests, `concurrency` at a time; return once the server is idle."""
    tally, began = Tally(), time.monotonic()
    seeds = iter(range(first_seed, first_seed + count))

    async def client() -> None:
        for seed in seeds:
            tally.ends[await request(server.port, seed)] += 1
            if sum(tally.ends.values()) % max(1, count // 10) == 0:
                tally.memory.append(server.memory())

    await asyncio.gather(*(client() for _ in range(concurrency)))
    tally.metrics = await settled_counters(server.port)
    tally.seconds = time.monotonic() - began
    return tally


async def settled_counters(port: int) -> dict[str, float]:
    """Wait until the server is idle and return its metrics."""
    deadline = time.monotonic() + PATIENCE
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        lines = (await reader.read()).decode().partition("\r\n\r\n")[2].splitlines()
        writer.close()
        found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:4] == "tok_")}
        if not any(found[f"tok_{name}"] for name in GAUGES) and found["tok_connections"] <= 1:
            return found
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)


def main() -> None:
    """Print how the requests ended, and the memory of the server."""
    count, concurrency = map(int, sys.argv[1:3])
    with served() as server:
        asyncio.run(load(server, concurrency, concurrency, first_seed=10**6))  # warm up to peak memory
        warm = server.memory()
        tally = asyncio.run(load(server, count, concurrency))
        after = server.memory()
    print(f"{count} requests, {concurrency} at a time: {tally.seconds:.0f} s; {dict(tally.ends)}")
    print(f"memory, MiB: {warm >> 20} before; {[one >> 20 for one in tally.memory]} meanwhile; {after >> 20} after")
    print({name: value for name, value in tally.metrics.items() if name in map("tok_{}".format, GAUGES)})


if __name__ == "__main__":
    main()
