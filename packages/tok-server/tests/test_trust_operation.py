"""Operation of the server: replica restarts, JSON logs, OpenTelemetry spans and the drain timeout."""

from __future__ import annotations

import http.client
import http.server
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.patience import PATIENCE, wait_until
from support.paused_engine import ENDLESS, ENDLESS_POSITIONS, gated
from support.serving import Server, serving
from support.tiny_models import make_model
from tok_core import InvalidField
from tok_core.messages import Silence
from tok_core.runtime.log_format import EXTRA_FIELDS, JsonFormatter
from tok_server.observability.telemetry import Telemetry

ADMIN = {"Authorization": "Bearer root"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_rolling_restart_of_replicas_loses_no_answer(tiny_model: Path) -> None:
    with serving(tiny_model, admin_key="root", engine_options={"dp": 2}) as server, ThreadPoolExecutor(8) as pool:
        stop = threading.Event()

        def ask(number: int) -> int:
            count = 0
            while not (count and stop.is_set()):
                fields = {"prompt": [number] * 20, "max_tokens": 60, "ignore_eos": True, "stream": number % 2 == 0}
                answer = server.complete(**fields)
                assert answer.status == 200, answer.body
                if fields["stream"]:
                    answer.chunks()
                count += 1
            return count

        asking = [pool.submit(ask, number) for number in range(4)]
        try:
            for number in ("0", "1"):
                answer = server.call("POST", f"/admin/replicas/{number}/restart", None, ADMIN)
                assert answer.status == 200, answer.body
                assert answer.json() == {"state": "ready", "detail": ""}
        finally:
            stop.set()
        assert all(one.result(PATIENCE) for one in asking)
        assert server.engine.stats()["restarts"] == 2
        for wrong in ("2", "-1", "x", "0" * 100):
            assert server.call("POST", f"/admin/replicas/{wrong}/restart", None, ADMIN).status == 404
        assert server.call("POST", "/admin/replicas/0/restart", None, {}).status == 401


def test_restart_of_the_only_replica_gives_503_and_a_second_restart_409(tiny_model: Path) -> None:
    with serving(tiny_model, admin_key="root") as server, ThreadPoolExecutor(4) as pool:
        with gated(server.engine, steps=8):
            long = pool.submit(server.complete, prompt="one", max_tokens=150, n=4, ignore_eos=True)
            wait_until(lambda: server.engine.stats()["requests_running"] == 1)
            restart = pool.submit(server.call, "POST", "/admin/replicas/0/restart", None, ADMIN)
            wait_until(lambda: server.engine.health().replicas[0].state == "draining")
            refused = server.complete(prompt="one")
            assert refused.status == 503
            assert refused.error()["code"] == "engine_unavailable"
            assert refused.headers["retry-after"] == "1"
            again = server.call("POST", "/admin/replicas/0/restart", None, ADMIN)
            assert again.status == 409
        assert long.result(PATIENCE).status == 200
        assert restart.result(PATIENCE).status == 200
        assert server.complete(prompt="one", max_tokens=1).status == 200


def test_unresponsive_replica_is_reported_and_restarts_without_drain(tiny_model: Path) -> None:
    with serving(tiny_model, admin_key="root") as server, ThreadPoolExecutor(4) as pool:
        replicas, why = server.engine._core._replica_set, "no sign of life from the manager process"
        with gated(server.engine, steps=8):
            long = pool.submit(server.complete, prompt="one", max_tokens=250, n=16, ignore_eos=True)
            wait_until(lambda: server.engine.stats()["requests_running"] == 1)
            replicas._receive(replicas.records[0], Silence(why))
        for path in ("/health", "/ready"):
            answer = server.call("GET", path, None)
            assert (answer.status, answer.json()["status"]) == (503, "unresponsive")
        assert server.call("GET", "/health", None).json()["detail"] == why
        assert server.complete(prompt="one").status == 503
        for drain in ("-1", "inf", "x", "nan"):
            refused = server.call("POST", f"/admin/replicas/0/restart?drain={drain}", None, ADMIN)
            assert (refused.status, refused.error()["param"]) == (400, "drain"), drain
        assert server.call("POST", "/admin/replicas/0/restart", None, ADMIN).json() == {"state": "ready", "detail": ""}
        assert long.result(120).status in (200, 503)  # the request may have finished before
        with gated(server.engine, steps=8):
            long = pool.submit(server.complete, prompt="one", max_tokens=250, n=16, ignore_eos=True)
            wait_until(lambda: server.engine.stats()["requests_running"] == 1)
        assert server.call("POST", "/admin/replicas/0/restart?drain=0", None, ADMIN).status == 200
        assert long.result(120).status in (200, 503)
        assert server.call("GET", "/ready", None).status == 200


def test_replica_restart_without_an_admin_key_gets_403(server: Server) -> None:
    answer = server.call("POST", "/admin/replicas/0/restart", None)
    assert answer.status == 403
    assert "--admin-key" in str(answer.error()["message"])


def record(message: str, **fields: object) -> logging.LogRecord:
    found = logging.LogRecord("tok.server", logging.INFO, __file__, 1, message, (), None)
    found.__dict__[EXTRA_FIELDS] = fields
    return found


@pytest.mark.parametrize("text", ["plain", "two\nlines", "\ud800 \x00 \u2028", '"quoted"'])
def test_json_formatter_writes_each_record_as_a_single_line(text: str) -> None:
    line = JsonFormatter("worker").format(record(text, path=text, number=1))
    assert "\n" not in line
    found = json.loads(line)
    assert found["level"] == "info"
    assert (found["logger"], found["process"], found["number"]) == ("tok.server", "worker", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found["time"])
    if text.isprintable():
        assert found["message"] == found["path"] == text


def test_request_log_has_request_id_token_counts_and_times(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def logged(name: str, value: str | None) -> list[logging.LogRecord]:
        """Return the lines with this field; earlier requests may be logged meanwhile."""
        return [one for one in caplog.records if getattr(one, EXTRA_FIELDS, {}).get(name) == value]

    with caplog.at_level(logging.INFO, "tok.server"):
        answer = server.complete(prompt=[1, 2, 3], max_tokens=5, ignore_eos=True)
        server.call("GET", "/no%0Asuch%0Aplace")
        wait_until(lambda: bool(logged("path", "/no%0Asuch%0Aplace")))
    (first,), (second,) = logged("request_id", answer.headers["x-request-id"]), logged("path", "/no%0Asuch%0Aplace")
    fields = getattr(first, EXTRA_FIELDS)
    assert (fields["prompt_tokens"], fields["output_tokens"], fields["status"]) == (3, 5, 200)
    assert 0 < fields["first_token_seconds"] <= fields["seconds"]
    assert "\n" not in second.getMessage()


def test_requests_that_a_stopping_server_refuses_are_no_errors_in_its_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def levels(request_id: str) -> set[int]:
        return {one.levelno for one in caplog.records if request_id in one.getMessage()}

    server.context.draining = True
    try:
        with caplog.at_level(logging.INFO, "tok.server"):
            answer = server.complete(prompt="one")
            wait_until(lambda: len(levels(answer.headers["x-request-id"])) > 0)
    finally:
        server.context.draining = False
    assert answer.status == 503
    assert levels(answer.headers["x-request-id"]) == {logging.INFO}


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """Run a collector of spans; yield its URL and the spans it receives."""
    spans: list[Span] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                assert {one.key: one.value.string_value for one in resource.resource.attributes}[
                    "service.name"
                ] == "tok"
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as accept_connections:
        thread = threading.Thread(target=accept_connections.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{accept_connections.server_port}", spans
        finally:
            accept_connections.shutdown()
            thread.join()


def test_request_span_has_its_events_and_joins_the_callers_trace(tiny_model: Path) -> None:
    with collector() as (url, spans):
        with serving(tiny_model, otlp_endpoint=url) as server:
            began = time.time_ns()
            caller = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "stream": True}
            assert server.call("POST", "/v1/completions", body, caller).status == 200
            assert server.complete(prompt="one", n=0).status == 400
        # The end of the server flushes the remaining spans.
        by_status = {attributes(span)["http.response.status_code"]: span for span in spans}
        good, bad = by_status[200], by_status[400]
    assert (good.trace_id.hex(), good.parent_span_id.hex()) == (TRACE, PARENT)
    assert bad.trace_id.hex() != TRACE
    assert bad.parent_span_id == b""
    assert good.kind == Span.SPAN_KIND_SERVER
    assert good.name == "POST /v1/completions"
    found = attributes(good)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 5)
    assert [event.name for event in good.events] == ["queued", "first_token", "finish"]
    times = [good.start_time_unix_nano, *(event.time_unix_nano for event in good.events)]
    assert times == sorted(times)
    assert began - 10**9 < times[0] < times[-1] <= good.end_time_unix_nano
    assert [event.name for event in bad.events] == ["finish"]


def attributes(span: Span) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://x", "http://", "http://[", ""])
def test_otlp_endpoint_that_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidField, match=r"^otlp_endpoint is .*; allowed: a URL"):
        Telemetry(url, "m")


def test_opentelemetry_is_imported_lazily_and_its_absence_is_reported() -> None:
    code = (
        "import sys\n"
        "from tok_server import Settings, make_app\nfrom tok_core import AsyncEngine, EngineConfig, InvalidField\n"
        "import tok_server.observability.telemetry\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "sys.modules['opentelemetry'] = None\n"
        "try: tok_server.observability.telemetry.Telemetry('http://127.0.0.1:1', 'm')\n"
        "except InvalidField as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = "otlp_endpoint is 'http://127.0.0.1:1'; allowed: none, because OpenTelemetry is not installed"
    assert done.stdout.startswith(told)
    assert "tok-server[otel]" in done.stdout


def test_drain_timeout_ends_open_streams_with_an_error_and_json_logs(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "endless", max_positions=ENDLESS_POSITIONS)
    flags = [
        "--port",
        "0",
        "--kv-cache-tokens",
        str(ENDLESS_POSITIONS),
        "--device",
        "cpu",
        "--drain-timeout",
        "0.5",
        "--log-format",
        "json",
        "--log-level",
        "info",
    ]
    command = [sys.executable, "-m", "tok_server.cli", "serve", str(model), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOK_API_KEY": "secret"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as popen:
        try:
            assert popen.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", popen.stdout.readline())
            assert found is not None
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=PATIENCE)
            body = json.dumps({"prompt": [1, 2, 3], "n": 8, "max_tokens": ENDLESS, "ignore_eos": True, "stream": True})
            headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
            popen.send_signal(signal.SIGTERM)
            last = response.read().decode().rstrip("\n").rpartition("data: ")[2]
            connection.close()
            _, errors = popen.communicate(timeout=PATIENCE)
        finally:
            popen.kill()
    assert popen.returncode == 0
    error = json.loads(last)["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
    lines = [json.loads(line) for line in errors.splitlines()]
    (told,) = [line for line in lines if line.get("path") == "/v1/completions"]
    assert (told["status"], told["api_key"], told["prompt_tokens"]) == (503, 0, 3)
    assert told["output_tokens"] > 0
