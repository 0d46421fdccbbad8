"""`tok bench server`: the real server and manager over a worker that computes nothing, a client in another process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tok_server.bench.server.client import RequestTally, drive
from tok_server.bench.server.command import SERVER_SCENARIOS
from tok_server.bench.server.server import SCENARIOS, ServerResult, table
from tok_server.cli import main

KEYS = [
    *("engine", "scenario", "offered_per_s", "requests_per_s", "tokens_per_s", "loop_p50", "loop_p99"),
    *("server_cpu", "engine_cpu", "client_cpu", "failures"),
]


def test_bench_server_prints_one_json_line_for_each_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in ("1", "10", "40"):  # beside other processes a scenario may not answer a request in a second
        assert main(["bench", "server", "--seconds", seconds, "--clients", "2", "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        if all(one["requests_per_s"] > 0 for one in found):
            break
    assert [one["scenario"] for one in found] == list(SCENARIOS) == list(SERVER_SCENARIOS)
    for one in found:
        assert list(one) == KEYS
        scenario = SCENARIOS[one["scenario"]]
        assert one["requests_per_s"] > 0
        each = scenario.n * scenario.tokens
        assert one["tokens_per_s"] == pytest.approx(one["requests_per_s"] * each, abs=0.1 * each)
        assert 0 <= one["loop_p50"] <= one["loop_p99"]
        for process in ("server", "engine", "client"):
            assert one[f"{process}_cpu"] > 0


def test_client_reads_sized_and_chunked_answers_and_counts_failures() -> None:
    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\ndata: 0\n\r\n10\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n",
    ]
    given: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for data in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: 2\r\n" in head
            assert await reader.readexactly(2) == b"{}"
            given.append(len(given))
            for byte in data:  # one byte at a time
                writer.write(bytes([byte]))
                await writer.drain()
        writer.close()

    async def ask() -> tuple[int, int]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            tally = await asyncio.to_thread(drive, port, 2, 0.0, 1.0, 0.0, b"{}")
        return tally.requests, tally.failures

    # Each connection fails twice: by the 429 and by its close.
    assert asyncio.run(ask()) == (2 * len(answers), 2 * 2)
    assert len(given) == 2 * len(answers)


def test_client_sends_at_the_offered_rate_however_fast_answers_come() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"{}")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def ask() -> RequestTally:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            return await asyncio.to_thread(drive, server.sockets[0].getsockname()[1], 4, 0.1, 1.0, 50.0, b"{}")

    began = time.monotonic()
    tally = asyncio.run(ask())
    assert tally.failures == 0
    assert 1 <= tally.requests <= 50.0 * (time.monotonic() - began)


def test_interrupted_client_ends_without_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        command = [sys.executable, "-m", "tok_server.bench.server.client", port, "1", "0", "600", "0", "{}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"begin\n"
            client.send_signal(signal.SIGINT)
            assert client.communicate() == (b"", b"")


def test_bench_server_table_has_a_line_for_each_scenario() -> None:
    rates = {"requests_per_s": 3000.5, "tokens_per_s": 24_004.0, "loop_p50": 0.1, "loop_p99": 12.34}
    cpu = {"server_cpu": 1.0, "engine_cpu": 0.5, "client_cpu": 0.4}
    result = ServerResult(engine="tok", scenario="whole", offered_per_s=0.0, failures=3, **rates, **cpu)
    head, line = table([result]).splitlines()
    assert head.split()[:2] == ["scenario", "requests/s"]
    assert line.split() == ["whole", "3,000.5", "24,004", "0.10", "12.34", "1.00", "0.50", "0.40", "3", "failed"]


@pytest.mark.parametrize(
    "words",
    [
        *(["--clients", "0"], ["--clients", "65"], ["--seconds", "0"], ["--seconds", "nan"]),
        ["--rate", "0"],
        ["--rate", "9"],
    ],
)
def test_bench_server_refuses_invalid_flag_values(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "server", *words]) == 2
    assert words[0] in capsys.readouterr().err
