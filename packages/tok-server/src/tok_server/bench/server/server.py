"""Measure the HTTP server in this process, over a simulated worker, with load generators in other processes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import NamedTuple

import msgspec
import numpy as np
from aiohttp import web

from tok_server.app import make_app
from tok_server.bench.server.client import RequestTally
from tok_server.bench.server.simulated_engine import SimulatedEngine
from tok_server.flags import DEMO_MODEL, DEMO_NAME
from tok_server.http import CONTEXT, accept_connections, shorten_pauses
from tok_server.serve import listen
from tok_server.settings import Settings

MAX_RUNNING = 8192
STEP_SECONDS = 0.005  # seconds a step: with this many samples, no GPU takes less
WARM_UP_SECONDS = 1.0  # seconds
DELAY_SAMPLE_SECONDS = 0.002  # seconds between measurements of the event loop's delay


class Scenario(NamedTuple):
    """A request, and the number of connections that send it repeatedly."""

    connections: int
    tokens: int
    n: int = 1
    stream: bool = False

    @property
    def body(self) -> str:
        fields = {"max_tokens": self.tokens, "n": self.n, "stream": self.stream}
        return json.dumps({"prompt": [1, 2, 3, 4, 5, 6, 7, 8], "ignore_eos": True, "temperature": 1, **fields})


SCENARIOS = {
    "whole": Scenario(connections=256, tokens=8),
    "streamed": Scenario(connections=512, tokens=128, stream=True),
    "samples": Scenario(connections=8, tokens=16, n=1024),
}


class ServerResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one scenario.

    offered_per_s   requests sent per second; 0: each connection sends its next request once it is answered
    *_per_s         rates of requests that were answered to their end
    loop_p50, _p99  delay of the server's event loop in ms
    *_cpu           CPU cores used by the server, by manager and worker, and by the clients
    """

    engine: str
    scenario: str
    offered_per_s: float
    requests_per_s: float
    tokens_per_s: float
    loop_p50: float
    loop_p99: float
    server_cpu: float
    engine_cpu: float
    client_cpu: float
    failures: int


class _UsageMeter:
    """CPU seconds used since creation, and the delays of the event loop in seconds while `measure_delays` runs."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.delays: list[float] = []
        self._engine = engine
        self._began, self._server, self._engines = time.monotonic(), time.process_time(), engine.cpu_seconds()

    async def measure_delays(self) -> None:
        while True:
            due = time.monotonic() + DELAY_SAMPLE_SECONDS
            await asyncio.sleep(DELAY_SAMPLE_SECONDS)
            self.delays.append(max(time.monotonic() - due, 0.0))

    def cores(self) -> tuple[float, float]:
        """Return the CPU cores used by the server, and by manager and worker."""
        seconds = time.monotonic() - self._began
        return (time.process_time() - self._server) / seconds, (self._engine.cpu_seconds() - self._engines) / seconds


async def run_server(names: list[str], clients: int, seconds: float, rate: float) -> list[ServerResult]:
    """Run the scenarios one after the other on the same server. Errors: TokError if the server cannot start.

    rate  requests sent per second; 0: each connection sends its next request once it is answered
    """
    engine = SimulatedEngine(str(DEMO_MODEL), MAX_RUNNING, step_seconds=STEP_SECONDS)
    await engine.start()
    runner = web.AppRunner(make_app(engine, Settings(model_name=DEMO_NAME)), handler_cancellation=True)
    try:
        await runner.setup()
        listener = listen("127.0.0.1", 0)
        async with accept_connections(runner, runner.app[CONTEXT], listener, None):
            port = int(listener.getsockname()[1])
            shorten_pauses()
            return [await _measure(name, engine, port, clients, seconds, rate) for name in names]
    finally:
        await runner.cleanup()
        await engine.close()


async def _measure(
    name: str, engine: SimulatedEngine, port: int, clients: int, seconds: float, offered: float
) -> ServerResult:
    scenario = SCENARIOS[name]
    client_load = -(-scenario.connections // clients), offered / clients
    client_processes = [await _client(port, *client_load, seconds, scenario) for _ in range(clients)]
    await asyncio.gather(*(_line(process) for process in client_processes))
    meter = _UsageMeter(engine)
    delay_task = asyncio.create_task(meter.measure_delays())
    tallies = [
        msgspec.json.decode(line, type=RequestTally) for line in await asyncio.gather(*map(_line, client_processes))
    ]
    server_cpu, engine_cpu = meter.cores()
    delay_task.cancel()
    await asyncio.gather(*(process.wait() for process in client_processes))
    rate = sum(tally.requests / tally.seconds for tally in tallies)
    p50, p99 = np.percentile(meter.delays, (50, 99)) * 1e3
    return ServerResult(
        engine="tok",
        scenario=name,
        offered_per_s=offered,
        requests_per_s=round(rate, 1),
        tokens_per_s=round(rate * scenario.n * scenario.tokens, 1),
        loop_p50=round(float(p50), 3),
        loop_p99=round(float(p99), 3),
        server_cpu=round(server_cpu, 3),
        engine_cpu=round(engine_cpu, 3),
        client_cpu=round(sum(tally.cpu / tally.seconds for tally in tallies), 3),
        failures=sum(tally.failures for tally in tallies),
    )


async def _client(port: int, connections: int, rate: float, seconds: float, scenario: Scenario) -> Process:
    arguments = (str(port), str(connections), str(WARM_UP_SECONDS), str(seconds), str(rate), scenario.body)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tok_server.bench.server.client", *arguments, stdout=PIPE
    )


async def _line(client: Process) -> bytes:
    assert client.stdout is not None
    return await client.stdout.readline()


def table(results: list[ServerResult]) -> str:
    """Return the results as text."""
    names = ("scenario", "requests/s", "tokens/s", "delay p50 ms", "p99 ms", "server CPU", "engine CPU", "client CPU")
    lines = ["".join(f"{name:>13}" for name in names)]
    for result in results:
        rates = f"{result.scenario:>13}{result.requests_per_s:>13,.1f}{result.tokens_per_s:>13,.0f}"
        cpu = "".join(f"{cores:>13.2f}" for cores in (result.server_cpu, result.engine_cpu, result.client_cpu))
        failed = f"  {result.failures} failed" if result.failures else ""
        lines.append(f"{rates}{result.loop_p50:>13.2f}{result.loop_p99:>13.2f}{cpu}{failed}")
    return "\n".join(lines)
