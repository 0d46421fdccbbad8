"""Measure how much memory a server holds for idle connections.

`PYTHONPATH=tests python -m support.idle_connections 10000` starts a server of the demo model and prints it.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

USED = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def hold(port: int, count: int, pid: int) -> int:
    """Open `count` connections, send a request on half of them, and send one completion request beside them.

    Return by how many bytes the process `pid` has grown.
    """
    before = psutil.Process(pid).memory_info().rss
    open_ones = []
    for first in range(0, count, 200):
        batch = range(first, min(first + 200, count))
        open_ones += await asyncio.gather(*(_connect(port, number % 2 == 0) for number in batch))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": [1], "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    grown = int(psutil.Process(pid).memory_info().rss - before)
    for one in (*open_ones, writer):
        one.close()
    await asyncio.gather(*(one.wait_closed() for one in (*open_ones, writer)))
    return grown


async def _connect(port: int, used: bool) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if used:
        writer.write(USED)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    return writer


@contextmanager
def served() -> Iterator[tuple[int, int]]:
    """Run a server of the demo model and yield its port and process id."""
    flags = ["serve", "--port", "0", "--device", "cpu", "--log-level", "error"]
    command = [sys.executable, "-m", "tok_server.cli", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as popen:
        try:
            assert popen.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", popen.stdout.readline())
            assert found is not None
            yield int(found[1]), popen.pid
        finally:
            popen.terminate()


def main() -> None:
    """Print how much memory `sys.argv[1]` connections take."""
    count = int(sys.argv[1])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with served() as (port, pid):
        grown = asyncio.run(hold(port, count, pid))
    print(f"{count} idle connections: {grown / (1 << 20):.1f} MiB, {grown / count / 1024:.1f} KiB each")


if __name__ == "__main__":
    main()
