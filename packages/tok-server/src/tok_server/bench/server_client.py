"""The clients of `tok bench server`, in a process of their own: connections that each ask again and again.

`python -m tok_server.bench.server_client PORT CONNECTIONS WARM_UP SECONDS BODY`. Says "begin" once the warm-up is over,
and at the end how many requests were answered since, the CPU seconds that took here, and how long it was.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

MOST_HEAD = 1 << 16
END = b"0\r\n\r\n"


class Tally(msgspec.Struct):
    """What has happened since the warm-up; failures: since the beginning."""

    requests: int = 0
    failures: int = 0
    cpu: float = 0.0
    seconds: float = 0.0


async def drive(port: int, connections: int, warm_up: float, seconds: float, body: bytes) -> Tally:
    """Asks for so long. Responses under way at the end are left out."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    data, tally = f"{head}\r\n\r\n".encode() + body, Tally()
    tasks = [asyncio.create_task(_ask(port, data, tally)) for _ in range(connections)]
    await asyncio.sleep(warm_up)
    tally.requests, began, cpu = 0, time.monotonic(), time.process_time()
    print("begin", flush=True)
    await asyncio.sleep(seconds)
    tally.cpu, tally.seconds = time.process_time() - cpu, time.monotonic() - began
    for task in tasks:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    tally.failures += sum(isinstance(one, Exception) for one in found)
    return tally


async def _ask(port: int, data: bytes, tally: Tally) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MOST_HEAD)
    try:
        while True:
            writer.write(data)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            tally.failures += b" 200 " not in head[:16]
            if (at := head.find(b"content-length: ")) >= 0:
                await reader.readexactly(int(head[at + 16 : head.index(b"\r\n", at)]))
            else:
                await _read_chunks(reader)
            tally.requests += 1
    finally:
        writer.close()


async def _read_chunks(reader: asyncio.StreamReader) -> None:
    """Until the last, empty chunk: a body of JSON or of events never ends like it."""
    end = b""
    while not end.endswith(END):
        part = await reader.read(MOST_HEAD)
        if not part:
            raise ConnectionError("the server has gone")
        end = (end + part)[-len(END) :]


def main(words: list[str]) -> None:
    """Prints a line at the beginning and one at the end."""
    port, connections, warm_up, seconds, body = words
    tally = asyncio.run(drive(int(port), int(connections), float(warm_up), float(seconds), body.encode()))
    print(msgspec.json.encode(tally).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
