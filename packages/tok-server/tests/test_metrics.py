"""Metrics of requests: times and lengths; and the documents that name metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from support.background import Later
from support.patience import wait_until
from support.paused_engine import gated
from support.serving import Server, serving
from support.workspace import ROOT

HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
NAME = re.compile(r"\b(?:tok|process)_[a-z0-9_]+[a-z0-9]\b")
PER_PROMPT = [f"tok_request_{part}_seconds" for part in ("queue_time", "prefill_time", "decode_time")]


@pytest.fixture(scope="module")
def storing_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_model, data_dir=str(tmp_path_factory.mktemp("data"))) as running:
        yield running


def samples(server: Server) -> dict[str, float]:
    """Return the values of all metrics without labels."""
    text = server.call("GET", "/metrics").body.decode()
    return {one.name: one.value for family in parse(text) for one in family.samples if not one.labels}


def exported(server: Server) -> set[str]:
    """Return the names of all samples that the server exports, or would export once there is anything to count."""
    text = server.call("GET", "/metrics").body.decode()
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    names = {name for name, _ in kinds}
    return names | {name + part for name, kind in kinds if kind == "histogram" for part in HISTOGRAM_PARTS}


def gained(server: Server, before: dict[str, float], name: str) -> float:
    return samples(server)[name] - before[name]


def test_times_and_lengths_are_observed_once_per_prompt_and_sample(server: Server) -> None:
    before = samples(server)
    body = {"prompt": ["one two three", "one"], "n": 3, "max_tokens": 5, "ignore_eos": True}
    answer = server.complete(**body)
    assert answer.status == 200
    name = "tok_request_generation_tokens"
    wait_until(lambda: gained(server, before, f"{name}_count") == 6)
    assert gained(server, before, f"{name}_sum") == 6 * 5
    assert gained(server, before, "tok_request_prompt_tokens_count") == 2
    usage = answer.json()["usage"]
    assert isinstance(usage, dict)
    assert gained(server, before, "tok_request_prompt_tokens_sum") == usage["prompt_tokens"]
    for name in (*PER_PROMPT, "tok_request_time_per_output_token_seconds"):
        assert gained(server, before, f"{name}_count") == 2, name
    for name in PER_PROMPT[1:]:
        assert gained(server, before, f"{name}_sum") > 0, name
    per_token = gained(server, before, "tok_request_time_per_output_token_seconds_sum")
    assert per_token == pytest.approx(gained(server, before, "tok_request_decode_time_seconds_sum") / 4)
    assert gained(server, before, "tok_inter_token_latency_seconds_count") == 0  # nothing was streamed


def test_queue_prefill_and_decode_time_add_up_to_the_time_in_the_engine(server: Server) -> None:
    before = samples(server)
    assert server.complete(prompt="one two", max_tokens=20, ignore_eos=True).status == 200
    wait_until(lambda: gained(server, before, "tok_request_decode_time_seconds_count") == 1)
    total = sum(gained(server, before, f"{name}_sum") for name in PER_PROMPT)
    now = server.call("GET", "/metrics").body.decode()
    (took,) = re.findall(r'^tok_request_seconds_sum\{endpoint="/v1/completions"\} (\S+)$', now, re.MULTILINE)
    assert 0 < total < float(took)


def test_streamed_answers_have_inter_token_latencies(server: Server) -> None:
    before = samples(server)
    with gated(server.engine, steps=4):  # until the first token is sent: tokens that wait for it are sent together
        long = Later(lambda: server.complete(prompt="one", max_tokens=12, ignore_eos=True, stream=True))
        wait_until(lambda: gained(server, before, "tok_time_to_first_token_seconds_count") == 1)
    assert long.answer().status == 200
    wait_until(lambda: gained(server, before, "tok_request_decode_time_seconds_count") == 1)
    assert 1 <= gained(server, before, "tok_inter_token_latency_seconds_count") <= 11
    seconds = gained(server, before, "tok_inter_token_latency_seconds_sum")
    assert seconds == pytest.approx(gained(server, before, "tok_request_decode_time_seconds_sum"), abs=1.0)


def test_refused_requests_have_no_times(server: Server) -> None:
    before = samples(server)
    assert server.complete(prompt="one", temperature=-1).status == 400
    assert all(gained(server, before, f"{name}_count") == 0 for name in PER_PROMPT)


def test_grafana_dashboard_names_exported_metrics_only(storing_server: Server) -> None:
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 30
    names = {name for query in queries for name in NAME.findall(query)}
    assert all(NAME.search(query) for query in queries)
    assert names <= exported(storing_server), sorted(names - exported(storing_server))


def test_monitoring_page_names_every_metric_and_no_other(storing_server: Server) -> None:
    named = set(NAME.findall((ROOT / "docs" / "monitoring.md").read_text()))
    there = exported(storing_server)
    assert named <= there, sorted(named - there)
    families = {name for name in there if name.startswith("tok_") and not name.startswith("tok_replica_")}
    missing = {name for name in families if name not in named and not name.endswith((*HISTOGRAM_PARTS, "_created"))}
    assert not missing, sorted(missing)
