"""Run a workload against an OpenAI-compatible server with a fixed number of open requests, timed by the client."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from tok_core import TokError
from tok_server.bench.gpu import first_gpu
from tok_server.bench.watch import ShowProgress, call_periodically, progress_bar
from tok_server.bench.workloads.answers import BenchAnswer, request_body, send_request
from tok_server.bench.workloads.counters import with_counters
from tok_server.bench.workloads.histogram import Histograms, histogram
from tok_server.bench.workloads.offline import WARM_UP_TOKENS
from tok_server.bench.workloads.result import Result, percentile, ratio
from tok_server.bench.workloads.scrape import counters_of
from tok_server.bench.workloads.timeline import timeline_of_requests
from tok_server.bench.workloads.workload import Workload, WorkloadRequest, warm_up_requests

OBSERVE_SECONDS = 0.25  # between updates of the progress bar and samples of the GPU's memory
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class ServerError(TokError):
    """The benchmarked server does not answer, or answers with an error."""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """The benchmarked server, and how requests are sent to it.

    url          base URL, with or without "/v1"
    model        model name to send; None: the first model that the server lists
    engine       name of the server in the result
    concurrency  requests open at once
    stream       stream the answers, so that the time to the first token is known
    reset_path   path below the URL's host that is POSTed to before each repetition, to empty the server's cache
    wait         seconds to wait for the server
    timeout      seconds that one request may take
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    engine: str = "server"
    concurrency: int = 4096
    stream: bool = False
    reset_path: str | None = None
    wait: float = 0.0
    timeout: float = 3600.0

    @property
    def base(self) -> str:
        """Return the URL that ends in /v1."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"

    @property
    def host(self) -> str:
        """Return the URL without its path."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def local(self) -> bool:
        """Return whether the server runs on this machine, so that its GPU memory can be read."""
        return urlsplit(self.url).hostname in LOCAL_HOSTS


async def run_serve(target: ServerTarget, workload: Workload, reps: int) -> AsyncIterator[Result]:
    """Yield one result per repetition, after a warm-up. Errors: ServerError; the result counts failed requests."""
    _raise_file_limit()
    headers = {"Content-Type": "application/json"}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    limits = aiohttp.ClientTimeout(total=target.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, headers=headers, read_bufsize=1 << 20
    ) as session:
        model = await _await_model(session, target, workload)
        await _warm_up(session, target, workload, model)
        for rep in range(reps):
            await _reset(session, target)
            yield await _measure(session, target, workload, model, rep)


async def _find_model(session: aiohttp.ClientSession, target: ServerTarget) -> str:
    """Return the name of the model to request."""
    if target.model is not None:
        return target.model
    try:
        async with session.get(f"{target.base}/models", timeout=aiohttp.ClientTimeout(total=5)) as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerError(f"no server answers at {target.base}/models: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"{target.base}/models lists no model: {error!r}") from error


async def _await_model(session: aiohttp.ClientSession, target: ServerTarget, workload: Workload) -> str:
    """Wait until the server answers a request of one token. Some servers list their model before it is loaded."""
    deadline = time.monotonic() + target.wait
    probe = warm_up_requests(workload.requests, sequences=1, max_tokens=1)
    while True:
        try:
            model = await _find_model(session, target)
            answer = (await _send_all(session, target, _bodies(probe, workload, model, target), []))[0]
            if answer.error is None:
                return model
            raise ServerError(f"{target.base}/completions does not answer: {answer.error}")
        except ServerError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(0.5)


async def _warm_up(session: aiohttp.ClientSession, target: ServerTarget, workload: Workload, model: str) -> None:
    requests = warm_up_requests(workload.requests, max(target.concurrency, workload.requests[0].n), WARM_UP_TOKENS)
    answers = await _send_all(session, target, _bodies(requests, workload, model, target), [])
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors:
        raise ServerError(f"{len(errors)} of {len(answers)} requests failed in the warm-up: {errors[0]}")


async def _reset(session: aiohttp.ClientSession, target: ServerTarget) -> None:
    if target.reset_path is None:
        return
    url = f"{target.host}/{target.reset_path.lstrip('/')}"
    try:
        async with session.post(url) as response:
            if response.status != 200:
                raise ServerError(f"POST {url} returned {response.status}")
    except aiohttp.ClientError as error:
        raise ServerError(f"POST {url}: {error}") from error


async def _measure(
    session: aiohttp.ClientSession, target: ServerTarget, workload: Workload, model: str, rep: int
) -> Result:
    bodies = _bodies(workload.requests, workload, model, target)
    gpu = first_gpu() if target.local else None
    answers: list[BenchAnswer] = []
    before = await counters_of(session, f"{target.host}/metrics")
    with progress_bar(f"{workload.name} {rep}", len(bodies)) as show:

        def observe() -> None:
            _show(show, answers, len(bodies), target.concurrency)
            if gpu is not None:
                gpu.sample()

        with call_periodically(observe, OBSERVE_SECONDS):
            began = time.monotonic()
            ordered = await _send_all(session, target, bodies, answers)
            seconds = time.monotonic() - began
    gpu_memory = None if gpu is None else (gpu.name, round(gpu.peak / 2**30, 2))
    result = _result(target, workload, model, rep, ordered, began, seconds, gpu_memory)
    after = None if before is None else await counters_of(session, f"{target.host}/metrics")
    if before is None or after is None or after["steps"] < before["steps"]:  # not a tok server, or it restarted
        return result
    return with_counters(result, before, after)


def _bodies(requests: list[WorkloadRequest], workload: Workload, model: str, target: ServerTarget) -> list[bytes]:
    return [request_body(request, workload, model, stream=target.stream) for request in requests]


async def _send_all(
    session: aiohttp.ClientSession, target: ServerTarget, bodies: list[bytes], done: list[BenchAnswer]
) -> list[BenchAnswer]:
    """Return the answers in the order of `bodies`; `done` receives them in the order of completion."""
    answers: dict[int, BenchAnswer] = {}
    waiting: Iterator[tuple[int, bytes]] = iter(enumerate(bodies))
    url = f"{target.base}/completions"

    async def send_next() -> None:
        for index, data in waiting:
            answers[index] = await send_request(session, url, data, stream=target.stream)
            done.append(answers[index])

    await asyncio.gather(*(send_next() for _ in range(min(target.concurrency, len(bodies)))))
    return [answers[index] for index in range(len(bodies))]


def _show(show: ShowProgress, answers: list[BenchAnswer], total: int, concurrency: int) -> None:
    done = len(answers)
    show(done, sum(answer.output_tokens for answer in answers[:done]), min(concurrency, total - done))


def _raise_file_limit() -> None:
    """Raise the limit of open files, since every open request has a socket."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _result(
    target: ServerTarget,
    workload: Workload,
    model: str,
    rep: int,
    answers: list[BenchAnswer],
    began: float,
    seconds: float,
    gpu: tuple[str, float] | None,
) -> Result:
    successful = [answer for answer in answers if answer.error is None]
    errors = [answer.error for answer in answers if answer.error is not None]
    prompt_tokens = sum(answer.prompt_tokens for answer in successful)
    output_tokens = sum(answer.output_tokens for answer in successful)
    sequences = sum(answer.samples for answer in successful)
    latency = [answer.ended - answer.began for answer in successful]
    ttft = [answer.first - answer.began for answer in successful if answer.first is not None]
    per_token = _per_token(successful)
    cached = [answer.cached_tokens for answer in successful if answer.cached_tokens is not None]
    return Result(
        engine=target.engine,
        mode="http",
        workload=workload.name,
        rep=rep,
        prompts=len(answers),
        sequences=sequences,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=round(seconds, 3),
        output_tok_s=round(output_tokens / seconds, 1),
        total_tok_s=round((prompt_tokens + output_tokens) / seconds, 1),
        mean_out=round(ratio(output_tokens, sequences), 2),
        finished_by_stop=sum(answer.stopped for answer in successful),
        errors=len(errors),
        gpu=None if gpu is None else gpu[0],
        peak_gpu_mem_gib=None if gpu is None else gpu[1],
        latency_p50_s=percentile(latency, 0.5),
        latency_p99_s=percentile(latency, 0.99),
        concurrency=target.concurrency,
        model=model,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        per_token_p50_ms=percentile(per_token, 0.5, 1e3),
        per_token_p99_ms=percentile(per_token, 0.99, 1e3),
        prefix_hit_share=round(ratio(sum(cached), prompt_tokens), 4) if cached else None,
        first_error=errors[0] if errors else None,
        timeline=timeline_of_requests(
            [answer.began - began for answer in successful],
            [(answer.began if answer.first is None else answer.first) - began for answer in successful],
            [answer.ended - began for answer in successful],
            [answer.output_tokens for answer in successful],
            [answer.samples for answer in successful],
            seconds,
        ),
        histograms=Histograms(histogram(latency), histogram(ttft), histogram(per_token)),
    )


def _per_token(answers: list[BenchAnswer]) -> list[float]:
    """Return seconds per token of streamed answers with one sample.

    Answers with several samples are left out, because `usage` does not give the length of each.
    """
    return [
        (answer.ended - answer.first) / (answer.output_tokens - 1)
        for answer in answers
        if answer.first is not None and answer.samples == 1 and answer.output_tokens > 1
    ]
