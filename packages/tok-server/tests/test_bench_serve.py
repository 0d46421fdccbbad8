"""`tok bench serve` against a real server: counts from usage, times of the client, reported errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from support.serving import NAME, Server, serving
from tok_server.bench.workloads.histogram import histogram
from tok_server.bench.workloads.plot import plot_results
from tok_server.bench.workloads.result import Result
from tok_server.bench.workloads.serve import ServerError, ServerTarget, run_serve
from tok_server.bench.workloads.workload import Workload, WorkloadRequest
from tok_server.cli import main as tok

WORKLOAD = Workload(
    "mixed",
    0.8,
    1.0,
    [WorkloadRequest([10 + index, *range(20, 60)], 1 + index % 2, 4 + index, ignore_eos=True) for index in range(6)],
)
OUTPUT = sum(one.n * one.max_tokens for one in WORKLOAD.requests)


async def run(target: ServerTarget, workload: Workload = WORKLOAD, reps: int = 1) -> list[Result]:
    return [result async for result in run_serve(target, workload, reps)]


@pytest.mark.parametrize("stream", [False, True])
def test_token_counts_come_from_the_servers_usage(server: Server, stream: bool) -> None:
    target = ServerTarget(server.url, engine="mine", concurrency=3, stream=stream)
    first, second = asyncio.run(run(target, reps=2))
    for rep, one in enumerate((first, second)):
        assert (one.engine, one.mode, one.workload, one.rep, one.model) == ("mine", "http", "mixed", rep, NAME)
        assert (one.prompts, one.sequences, one.prompt_tokens) == (6, 9, 6 * 41)
        assert (one.output_tokens, one.errors, one.first_error) == (OUTPUT, 0, None)
        assert (one.concurrency, one.finished_by_stop) == (3, 0)
        assert one.latency_p99_s is not None
        assert 0 < one.latency_p99_s <= one.seconds
    assert second.prefix_hit_share == round(32 / 41, 4)


def test_tok_server_metrics_give_step_counts_and_times(server: Server) -> None:
    (found,) = asyncio.run(run(ServerTarget(server.url, concurrency=3)))
    assert found.steps is not None
    assert 8 <= found.steps <= OUTPUT  # two rounds of three requests, none of less than 4 tokens
    assert (found.preemptions, found.group_rows_share is not None) == (0, True)
    parts = (found.schedule_ms, found.launch_ms, found.device_ms, found.output_ms)
    assert all(part is not None and part > 0 for part in parts)
    assert found.gpu_busy_share is not None
    assert 0 < found.gpu_busy_share <= 1


def test_ttft_and_time_per_token_need_streaming(server: Server) -> None:
    whole, streamed = (asyncio.run(run(ServerTarget(server.url, stream=stream)))[0] for stream in (False, True))
    assert (whole.ttft_p50_s, whole.per_token_p50_ms) == (None, None)
    assert streamed.ttft_p50_s is not None
    assert streamed.latency_p50_s is not None
    assert streamed.per_token_p50_ms is not None
    assert 0 < streamed.ttft_p50_s < streamed.latency_p50_s
    assert 0 < streamed.per_token_p50_ms < streamed.seconds * 1000


def test_histograms_have_every_request_and_appear_in_the_plot(server: Server, tmp_path: Path) -> None:
    whole, streamed = (asyncio.run(run(ServerTarget(server.url, stream=stream)))[0] for stream in (False, True))
    assert whole.histograms is not None
    assert streamed.histograms is not None
    assert (whole.histograms.first_token, whole.histograms.per_token) == (None, None)
    singles = sum(one.n == 1 for one in WORKLOAD.requests)
    for found, count, p50 in (
        (whole.histograms.request, 6, whole.latency_p50_s),
        (streamed.histograms.first_token, 6, streamed.ttft_p50_s),
        (streamed.histograms.per_token, singles, (streamed.per_token_p50_ms or 0) / 1e3),
    ):
        assert found is not None
        assert p50 is not None
        assert (sum(found.counts), len(found.edges)) == (count, len(found.counts) + 1)
        assert found.edges[0] * 0.999 <= p50 <= found.edges[-1] * 1.001
    bare = msgspec.structs.replace(streamed, histograms=None)
    sizes = []
    for number, one in enumerate((bare, whole, streamed)):
        plot_results([one], tmp_path / f"{number}.png")
        sizes.append(int.from_bytes((tmp_path / f"{number}.png").read_bytes()[20:24]))
    assert sizes[0] < sizes[1] == sizes[2]


@given(st.lists(st.floats(0, 1e4), max_size=50))
def test_histogram_counts_every_value(seconds: list[float]) -> None:
    found = histogram(seconds)
    assert (found is None) == (not seconds)
    if found is not None:
        assert sum(found.counts) == len(seconds)
        assert found.edges == sorted(found.edges)


def test_finished_by_stop_counts_samples_that_end_at_eos(server: Server) -> None:
    chatty = Workload("stops", 50.0, 1.0, [WorkloadRequest([1, 2, 3], 64, 80, ignore_eos=False)])
    for stream in (False, True):
        (found,) = asyncio.run(run(ServerTarget(server.url, stream=stream), chatty))
        assert found.sequences == 64
        assert 0 < found.finished_by_stop <= 64  # 2 of 512 ids end a sample, and all are about as likely
        assert found.output_tokens < 64 * 80


def test_bench_serve_prints_results_and_writes_a_plot(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "w.jsonl").write_text('{"rand": [1, 9], "max_tokens": 5, "ignore_eos": true}\n')
    words = ["bench", "serve", "--url", f"http://127.0.0.1:{server.port}/", "--workload", str(file), "--reps", "1"]
    assert tok([*words]) == 1
    assert "/v1/completions does not answer: 400" in capsys.readouterr().err
    file.write_text('{"ids": [1, 9], "max_tokens": 5, "ignore_eos": true}\n')
    assert tok([*words, "--json", "--plot", str(tmp_path / "plot.png")]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 5
    assert (tmp_path / "plot.png").is_file()
    assert tok([*words, "--stream", "--label", "mine"]) == 0
    assert capsys.readouterr().out.startswith(f"w on {NAME}, http, mine\n  output tokens/s ")


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_url_may_leave_out_v1(path: str) -> None:
    target = ServerTarget(f"http://host:1{path}")
    assert (target.base, target.host) == ("http://host:1/v1", "http://host:1")


def test_bench_serve_sends_the_api_key(tiny_model: Path) -> None:
    with serving(tiny_model, api_key="secret") as locked:
        (found,) = asyncio.run(run(ServerTarget(locked.url, api_key="secret")))
        assert found.errors == 0
        assert found.steps is not None
        with pytest.raises(ServerError, match="/v1/models: 401"):
            asyncio.run(run(ServerTarget(locked.url, api_key="wrong")))


def test_bench_serve_reports_that_no_server_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (file := tmp_path / "w.jsonl").write_text('{"ids": [1], "max_tokens": 5}\n')
    assert tok(["bench", "serve", "--url", "http://127.0.0.1:9", "--workload", str(file)]) == 1
    assert capsys.readouterr().err.startswith("tok bench: error: no server answers at http://127.0.0.1:9/v1/models")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--url", "here:80"], "--url is 'here:80'; allowed: URLs that begin with http"),
        (["--concurrency", "0"], "--concurrency is 0; allowed: integers from 1"),
        (["--timeout", "0"], "--timeout is 0.0; allowed: seconds above 0"),
        (["--wait", "-1"], "--wait is -1.0; allowed: seconds from 0"),
    ],
)
def test_bench_serve_refuses_invalid_flag_values(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tok(["bench", "serve", "--url", "http://x", "--workload", "w", *given]) == 2
    assert capsys.readouterr().err.startswith(f"tok bench: error: {told}")


@asynccontextmanager
async def another_server(answers: Sequence[web.Response | str]) -> AsyncIterator[tuple[str, list[str]]]:
    """Run a server of another make, and yield its URL and the list of requested paths.

    It answers completions with `answers` in turn and repeats the last one.
    """
    asked: list[str] = []
    left = list(answers)

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        await request.read()
        if not request.path.startswith("/v1/completions"):
            return web.Response()
        found = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(text=found) if isinstance(found, str) else web.Response(status=found.status)

    async def other_page(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>tok_steps_total 1</html>")

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    app.router.add_get("/metrics", other_page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


WHOLE = '{"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


async def test_server_without_cached_token_counts_has_no_prefix_hit_share() -> None:
    async with another_server([WHOLE]) as (url, asked):
        (found,) = await run(ServerTarget(url, model="m", reset_path="/reset_prefix_cache"))
    assert (found.output_tokens, found.sequences, found.finished_by_stop) == (12, 6, 6)
    assert found.prefix_hit_share is None
    assert (found.steps, found.gpu_busy_share, found.device_ms, found.timeline.device_busy) == (None, None, None, None)
    assert asked.count("/reset_prefix_cache") == 1
    assert asked.index("/reset_prefix_cache") == len(asked) - 7


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (web.Response(status=500), "500 b''"),
        ('{"choices": []}', "reports no tokens"),
        ('{"error": {"message": "no"}}', '{"message":"no"}'),
        ("nonsense", "DecodeError"),
    ],
)
async def test_failed_requests_are_counted_and_the_first_error_is_reported(bad: web.Response | str, told: str) -> None:
    good = 1 + 6  # the request that finds the server ready, and the warm-up
    async with another_server([*[WHOLE] * (good + 5), bad]) as (url, _):
        (found,) = await run(ServerTarget(url, model="m", concurrency=20))
    assert (found.errors, found.prompts, found.output_tokens) == (1, 6, 10)
    assert told in (found.first_error or "")


async def test_wait_option_waits_for_a_server_that_is_not_ready() -> None:
    async with another_server([web.Response(status=503), WHOLE]) as (url, _):
        with pytest.raises(ServerError, match="completions does not answer: 503"):
            await run(ServerTarget(url, model="m"))
    async with another_server([web.Response(status=503), WHOLE]) as (url, _):
        (found,) = await run(ServerTarget(url, model="m", wait=30))
    assert found.errors == 0


async def test_stream_without_done_counts_as_an_error() -> None:
    cut = 'data: {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    whole = cut + "data: [DONE]\n\n"
    async with another_server([whole] * 12 + [cut]) as (url, _):
        (found,) = await run(ServerTarget(url, model="m", stream=True))
    assert (found.errors, found.first_error) == (1, "the stream ended without [DONE]")
