"""The dashboard without a browser: history, latencies, event stream and access."""

from __future__ import annotations

import http.client
import json
import math
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.patience import PATIENCE, wait_until
from support.serving import Server, serving
from tok_server import dashboard
from tok_server.dashboard.events import FILES
from tok_server.dashboard.history import (
    COLUMNS,
    HOUR_ROWS,
    LATENCY,
    SECOND_ROWS,
    SECONDS_PER_ROW,
    SERVER_COLUMNS,
    History,
)
from tok_server.demo import MODEL_DIR
from tok_server.observability.metrics import EngineStats
from tok_server.observability.request_stats import (
    BUCKET_RATIO,
    HOUR_SLICES,
    MAX_LATENCY_SECONDS,
    MIN_LATENCY_SECONDS,
    MINUTES_SECONDS,
    QUANTILES,
    RECENT_SECONDS,
    Latencies,
    RequestDurations,
)

KEY = {"Authorization": "Bearer secret"}
NOTHING = [math.nan] * len(LATENCY)
QUIET = [0.0] * len(SERVER_COLUMNS)
FOLDER = Path(dashboard.__file__).parent / "page"


@given(st.lists(st.floats(MIN_LATENCY_SECONDS, MAX_LATENCY_SECONDS), min_size=1, max_size=200))
def test_latency_percentile_is_exact_to_its_bucket(seconds: list[float]) -> None:
    latencies = Latencies()
    for one in seconds:
        latencies.observe(RequestDurations(None, one, None, one))
    latencies.tick()
    found = latencies.recent()[len(QUANTILES) :]
    for number, share in enumerate(QUANTILES):
        exact = sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
        assert exact / BUCKET_RATIO * 0.999 <= found[number] <= exact * BUCKET_RATIO * 1.001
    assert all(math.isnan(one) for one in found[3:6])  # no request had a second token
    assert latencies.minutes().ended == latencies.hour().ended == len(seconds)
    assert latencies.minutes().percentiles[len(QUANTILES) :] == pytest.approx(found, nan_ok=True)


def test_latencies_are_dropped_after_an_hour_and_no_earlier() -> None:
    latencies = Latencies()
    latencies.observe(RequestDurations(None, 0.1, 0.01, 1.0))
    for ticks in range(1, RECENT_SECONDS * HOUR_SLICES + 1):
        latencies.tick()
        assert latencies.hour().ended == 1
        assert latencies.minutes().ended == (ticks <= MINUTES_SECONDS)
        assert math.isnan(latencies.recent()[-1]) == (ticks > RECENT_SECONDS)
    for _ in range(RECENT_SECONDS):
        latencies.tick()
    assert latencies.hour().ended == 0
    assert all(math.isnan(one) for one in latencies.hour().percentiles)


def stats(second: int, **gauges: float) -> dict[str, float]:
    """Return a replica's stats with, per second, 100 prompt tokens (half cached), 10 output tokens, 2 preemptions."""
    counted = {
        "prompt_tokens": 100.0,
        "cached_tokens": 50.0,
        "output_tokens": 10.0,
        "device_seconds": 0.25,
        "preemptions": 2.0,
    }
    found = {name: value * second for name, value in counted.items()}
    return {**found, "pages_total": 8.0, "pages_used": 2.0, "requests_waiting": 3.0, **gauges}


def test_history_rows_hold_rates_and_gauges_in_total_and_per_replica() -> None:
    history = History(2)
    for second in range(SECONDS_PER_ROW):
        one, other = stats(second), stats(2 * second)
        whole = {name: one[name] + other[name] for name in one}
        full = history.add(
            EngineStats(whole, [one, other]), NOTHING, [1.0, 0.0, 3.0, 7.0], time=1e9 + second, clock=float(second)
        )
        assert full == (second == SECONDS_PER_ROW - 1)
    row = history.seconds[-1]
    own = 1 + len(COLUMNS) + len(LATENCY) + len(SERVER_COLUMNS)
    cells = [
        dict(zip(COLUMNS, row[start : start + len(COLUMNS)], strict=True)) for start in (1, own, own + len(COLUMNS))
    ]
    assert [one["output"] for one in cells] == [30.0, 10.0, 20.0]
    assert [one["input"] for one in cells] == [300.0, 100.0, 200.0]
    assert [one["busy"] for one in cells] == [0.375, 0.25, 0.5]
    assert [one["queued"] for one in cells] == [6.0, 3.0, 3.0]
    assert [one["preempted"] for one in cells] == [6.0, 2.0, 4.0]
    assert row[own - len(SERVER_COLUMNS) : own].tolist() == [1.0, 0.0, 3.0, 7.0]
    assert all(one["hits"] == 0.5 and one["pages"] == 0.25 for one in cells)
    assert len(row) == own + 2 * len(COLUMNS)
    ten = history.tens[-1]
    assert ten[0] == row[0]
    assert ten[1 + COLUMNS.index("preempted")] * SECONDS_PER_ROW == pytest.approx(6.0 * 9)  # all that happened
    assert ten[1 + COLUMNS.index("output")] == pytest.approx(27.0)  # the first second has no rate yet


def test_history_is_bounded_and_has_no_hit_rate_without_prompts() -> None:
    history = History(1)
    for second in range(SECONDS_PER_ROW * HOUR_ROWS + 50):
        history.add(EngineStats(stats(0), [stats(0)]), NOTHING, QUIET, time=float(second), clock=float(second))
    assert (len(history.seconds), len(history.tens)) == (SECOND_ROWS, HOUR_ROWS)
    assert math.isnan(history.tens[-1][1 + COLUMNS.index("hits")])


def test_counter_resets_give_no_negative_rates() -> None:
    history = History(1)
    for second, counted in enumerate((50, 51, 0, 1)):
        history.add(EngineStats(stats(counted), [stats(counted)]), NOTHING, QUIET, time=second, clock=float(second))
    assert [row[1 + COLUMNS.index("output")] for row in history.seconds] == [0.0, 10.0, 0.0, 10.0]


@contextmanager
def event_stream(server: Server, headers: dict[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as connection:
        connection.request("GET", "/dashboard/events", headers=headers or {})
        yield connection.getresponse()


def read_event(response: http.client.HTTPResponse) -> tuple[str, dict[str, object]]:
    name, data, blank = (response.readline().decode() for _ in range(3))
    assert blank == "\n"
    return name.removeprefix("event: ").strip(), json.loads(data.removeprefix("data: "))


def cells(row: object) -> dict[str, float]:
    assert isinstance(row, list)
    return dict(zip(COLUMNS, row[1 : 1 + len(COLUMNS)], strict=True))


def test_dashboard_events_send_the_history_and_then_samples(server: Server) -> None:
    with event_stream(server) as response:
        assert response.getheader("Content-Type", "").startswith("text/event-stream")
        name, opening = read_event(response)
        assert (name, opening["model"], opening["columns"]) == ("opening", "tiny", list(COLUMNS))
        assert isinstance(opening["seconds"], list)
        last = opening["seconds"][-1][0]
        assert server.complete(prompt="one two", max_tokens=40, ignore_eos=True).status == 200
        made = 0.0
        for _ in range(60):
            name, sample = read_event(response)
            assert name == "sample"
            row = sample["row"]
            assert isinstance(row, list)
            assert row[0] > last
            # Rates cover intervals that may last longer than a second.
            made, last = made + cells(row)["output"] * 0.5, row[0]
            latency = sample["latency"]
            assert isinstance(latency, list)
            assert [len(one) for one in latency] == [len(LATENCY)] * 2
            if made and all(value is not None and value > 0 for window in latency for value in window):
                break
        assert made > 0
        ended, sizes = sample["ended"], sample["sizes"]
        assert isinstance(ended, list)
        assert isinstance(sizes, dict)
        assert min(ended) >= 1
        assert sizes["context"] == server.engine.info.max_model_len
        assert sizes["cache"] == server.engine.info.kv_cache_tokens
        assert sample["state"] == "ready"
        assert "cpu" in str(sample["device"])


def test_dashboard_events_count_errors_by_status_and_refusals_by_limit(tiny_model: Path) -> None:
    with serving(tiny_model, max_n=2) as strict, event_stream(strict) as response:
        assert read_event(response)[1]["keyed"] is False
        assert strict.complete(prompt="one", n=3).status == 400
        assert strict.complete(prompt="one", temperature=-1).status == 400
        wait_until(lambda: read_event(response)[1]["errors"] == {"400": 2})
        counted = read_event(response)[1]
        assert counted["refused"] == {"max_n": 1}
        assert "batches" not in counted


def test_dashboard_events_hold_batches_of_a_server_with_a_data_directory(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, data_dir=str(tmp_path)) as storing, event_stream(storing) as response:
        read_event(response)
        batches = read_event(response)[1]["batches"]
        assert isinstance(batches, list)
        is_open, _, lines, answered = batches
        assert set(is_open.values()) == {0}
        assert lines == {"waiting": 0, "running": 0}
        assert answered == {"completed": 0, "failed": 0}


def test_all_dashboard_viewers_get_the_same_rows(server: Server) -> None:
    with event_stream(server) as first, event_stream(server) as second:
        read_event(first), read_event(second)
        rows = [{json.dumps(read_event(one)[1]["row"]) for _ in range(3)} for one in (first, second)]
    assert len(rows[0] & rows[1]) >= 2


def test_dashboard_viewers_do_not_delay_a_drain(server: Server) -> None:
    with event_stream(server) as response:
        read_event(response)
        server.context.draining = True
        try:
            while response.readline():
                pass
        finally:
            server.context.draining = False
    wait_until(lambda: server.context.open_requests == 0)


def test_dashboard_page_is_open_but_its_events_need_the_api_key(tiny_model: Path) -> None:
    with serving(tiny_model, api_key="secret") as guarded:
        for path in FILES:
            answer = guarded.call("GET", path)
            assert answer.status == 200
            assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        assert guarded.call("GET", "/dashboard/events").error()["code"] == "invalid_api_key"
        with event_stream(guarded, KEY) as response:
            assert read_event(response)[0] == "opening"


def test_demo_model_answers_the_example_prompts_of_the_dashboard() -> None:
    listed = re.search(r"EXAMPLES = (\[.*?\]);", (FOLDER / "chat.js").read_text(), re.DOTALL)
    assert listed is not None
    prompts = json.loads(re.sub(r",\s*\]", "]", listed.group(1)))
    with serving(MODEL_DIR, name="tok-demo") as demo:
        answers = []
        for prompt in prompts:
            body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 150}
            choices = demo.call("POST", "/v1/chat/completions", body).json()["choices"]
            assert isinstance(choices, list)
            answers.append(choices[0]["message"]["content"])
    assert "word problems" in answers[0]
    assert [answer.split()[-1] for answer in answers[1:]] == ["63", "530"]


def test_dashboard_page_has_no_external_hosts_or_inline_scripts() -> None:
    for name, _ in FILES.values():
        text = (FOLDER / name).read_text()
        assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>([^<]*)</script>", html) == [""]
    assert not re.search(r"<style|style=|\son\w+=", html)
