"""Operation of the server: client disconnects, API keys, health, metrics."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.patience import PATIENCE, wait_until
from support.serving import Server, serving

LONG = {"prompt": "one", "n": 16, "max_tokens": 1000, "ignore_eos": True}
SAMPLE = re.compile(r"^[a-zA-Z_:][a-zA-Z0-9_:]*(\{.*\})? [-+0-9.eE]+(inf|NaN)?$")


@pytest.fixture(scope="module")
def keyed_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, api_key="open sesame") as running:
        yield running


def metric(server: Server, name: str) -> float:
    for line in server.call("GET", "/metrics").body.decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    raise AssertionError(f"no metric {name}")


@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnect_aborts_its_request(server: Server, stream: bool) -> None:
    before = server.engine.stats()
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        if stream:
            assert connection.recv(4096)
        wait_until(lambda: server.engine.stats()["output_tokens"] > before["output_tokens"])
    wait_until(lambda: server.engine.stats()["requests_running"] == 0)
    wait_until(lambda: server.context.open_requests == 0)
    wait_until(lambda: server.engine.stats()["pages_used"] == 0)  # steps in flight hold pages until they return
    assert server.engine.stats()["output_tokens"] - before["output_tokens"] < 16 * 1000


def test_request_without_the_api_key_gets_401_except_health(keyed_server: Server) -> None:
    for headers in (
        {},
        {"Authorization": "open sesame"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer open sesamf"},
        {"Authorization": "Basic open sesame"},
        {"Authorization": "Bearer \u00fc"},
    ):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics")):
            answer = keyed_server.call(method, path, None, headers)
            assert answer.status == 401, headers
            assert answer.error()["code"] == "invalid_api_key"
    assert keyed_server.call("GET", "/health").status == 200


def test_request_with_the_api_key_is_served(keyed_server: Server) -> None:
    headers = {"Authorization": "Bearer open sesame"}
    assert keyed_server.call("GET", "/v1/models", None, headers).status == 200
    body = {"prompt": "one", "max_tokens": 1}
    assert keyed_server.call("POST", "/v1/completions", body, headers).status == 200


def test_health_reports_ready(server: Server) -> None:
    answer = server.call("GET", "/health")
    assert (answer.status, answer.body) == (200, server.call("GET", "/ping").body)
    assert answer.json() == {"status": "ready", "detail": "", "replicas": [{"state": "ready", "detail": ""}]}


def test_draining_server_answers_503_and_health_reports_draining(server: Server) -> None:
    server.context.draining = True
    try:
        answer = server.complete(prompt="one")
        assert answer.status == 503
        assert answer.error()["code"] == "draining"
        assert answer.headers["retry-after"] == "1"
        health = server.call("GET", "/health")
        assert health.status == 503
        assert health.json()["status"] == "draining"
    finally:
        server.context.draining = False
    assert server.complete(prompt="one", max_tokens=1).status == 200


def test_metrics_are_prometheus_text_and_count_requests_and_tokens(server: Server) -> None:
    done = 'tok_http_requests_total{endpoint="/v1/completions",status="200"}'
    server.complete(prompt="one", max_tokens=1)
    before = {name: metric(server, name) for name in (done, "tok_output_tokens_total")}
    server.complete(prompt="one", n=2, max_tokens=7, ignore_eos=True)
    server.call("GET", "/no/such/place")
    wait_until(lambda: metric(server, "tok_output_tokens_total") == before["tok_output_tokens_total"] + 14)
    assert metric(server, done) == before[done] + 1
    assert metric(server, 'tok_http_requests_total{endpoint="other",status="404"}') >= 1
    assert metric(server, "tok_requests_running") == metric(server, "tok_sequences_running") == 0
    for part in ("schedule", "launch", "device", "output"):
        assert metric(server, f"tok_{part}_seconds_total") > 0
    assert metric(server, "tok_pages_total") == 16_384 / 16
    assert metric(server, "tok_replicas") == metric(server, "tok_replicas_ready") == 1
    assert metric(server, 'tok_replica_ready{replica="0"}') == 1
    for name in ("output_tokens_total", "restarts_total", "pages_total"):
        assert metric(server, f'tok_replica_{name}{{replica="0"}}') == metric(server, f"tok_{name}")
    assert metric(server, "tok_time_to_first_token_seconds_count") >= 2
    assert metric(server, 'tok_request_seconds_count{endpoint="/v1/completions"}') >= 2
    for line in server.call("GET", "/metrics").body.decode().splitlines():
        assert line.startswith("# ") or SAMPLE.match(line), line


def test_every_answer_has_its_own_x_request_id(server: Server) -> None:
    ids = {
        server.call("GET", "/health").headers["x-request-id"],
        server.call("GET", "/nothing").headers["x-request-id"],
        server.complete(prompt="one", max_tokens=1).headers["x-request-id"],
        server.complete(prompt="one", max_tokens=1, stream=True).headers["x-request-id"],
    }
    assert len(ids) == 4


def test_many_requests_may_use_one_connection(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        for fields in ({}, {"n": 0}, {"stream": True}, {}):
            body = json.dumps({"prompt": "one", "max_tokens": 2, **fields}).encode()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == (400 if "n" in fields else 200)
            response.read()
    finally:
        connection.close()
