"""`tok serve` as a process: startup, recovery from a worker's death, drain on a signal, exit."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from support.patience import PATIENCE, wait_until
from support.paused_engine import ENDLESS, ENDLESS_POSITIONS, stopped
from support.serving import Server, free_port
from support.tiny_models import make_model

READY = re.compile(r"tok is ready: (\S+) \(float32 on cpu\) at http://127\.0\.0\.1:(\d+)/v1\n")
LONG = {"prompt": "one", "max_tokens": ENDLESS, "ignore_eos": True, "temperature": 0, "stream": True}
TOK = [sys.executable, "-m", "tok_server.cli"]


class Process:
    """A `tok serve` process that has printed its ready line."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        assert popen.stdout is not None
        line = popen.stdout.readline()
        found = READY.fullmatch(line)
        assert found, line
        self.name, self.port = found[1], int(found[2])
        self.curl = popen.stdout.readline().rstrip("\n")

    def post(self, body: dict[str, object]) -> IO[bytes]:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        found: IO[bytes] = urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=PATIENCE)
        return found

    def health(self) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=PATIENCE) as answer:
                return answer.status, json.load(answer)["status"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)["status"]

    def worker(self) -> psutil.Process:
        """Return the child that uses most memory: it has loaded torch and the model."""
        return max(self.children(), key=lambda child: child.memory_info().rss)

    def requests(self) -> float:
        """Return how many requests the engine has, running or waiting."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=PATIENCE) as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        return float(lines["tok_requests_running"]) + float(lines["tok_requests_waiting"])

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.popen.pid).children(recursive=True)
        return found


@contextmanager
def tok_serve(model: Path, *flags: str) -> Iterator[Process]:
    arguments = ["serve", str(model), "--port", "0", "--device", "cpu", "--kv-cache-tokens", str(ENDLESS_POSITIONS)]
    arguments += ["--drain-timeout", str(PATIENCE), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*TOK, *arguments], stdout=subprocess.PIPE, text=True, env=environment) as popen:
        try:
            yield Process(popen)
        finally:
            popen.kill()


def events(stream: IO[bytes]) -> list[str]:
    blocks = stream.read().decode().strip().split("\n\n")
    return [block.removeprefix("data: ") for block in blocks if block]


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers do not end within a test."""
    return make_model("llama", tmp_path_factory.mktemp("endless") / "tiny", max_positions=ENDLESS_POSITIONS)


def test_server_starts_recovers_from_worker_death_drains_and_exits(endless_model: Path) -> None:
    with tok_serve(endless_model) as process:
        assert process.name == "tiny"
        answer = json.loads(run_curl(process.curl))
        assert answer["object"] == "chat.completion"

        with process.post({**LONG, "n": 8}) as stream:
            assert stream.readline().startswith(b"data: ")
            process.worker().kill()
            *_, last = events(stream)
        error = json.loads(last)["error"]
        assert error["type"] == "server_error"
        assert error["code"] == "engine_unavailable"
        wait_until(lambda: process.health() == (200, "ready"))
        with process.post({"prompt": "one", "max_tokens": 2}) as response:
            assert json.load(response)["choices"][0]["finish_reason"] in ("stop", "length")

        children = process.children()
        with ThreadPoolExecutor(1) as pool:
            with stopped(process.worker()):
                stream_soon = pool.submit(process.post, {**LONG, "max_tokens": 100})
                wait_until(lambda: process.requests() == 1)
                process.popen.send_signal(signal.SIGTERM)
                # For one Ctrl-C, a launcher and the terminal each send a signal.
                process.popen.send_signal(signal.SIGINT)
                wait_until(lambda: process.health() == (503, "draining"))
                with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                    process.post({"prompt": "one"})
                refused.value.close()
            with stream_soon.result() as stream:
                assert events(stream)[-1] == "[DONE]"
        assert process.popen.wait(PATIENCE) == 0
        wait_until(lambda: not any(child.is_running() for child in children))


def run_curl(command: str) -> bytes:
    """Send the request of the printed curl command and return the answer's body."""
    words = shlex.split(command)
    assert words[0] == "curl"
    assert words[2:4] == ["-H", "Content-Type: application/json"]
    assert words[4] == "-d"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(words[1], words[5].encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        body: bytes = response.read()
        return body


def test_second_signal_ends_a_draining_server_at_once(endless_model: Path) -> None:
    with tok_serve(endless_model) as process, process.post({**LONG, "n": 8}) as stream:
        assert stream.readline().startswith(b"data: ")
        children = process.children()
        process.popen.send_signal(signal.SIGINT)
        wait_until(lambda: process.health() == (503, "draining"))
        wait_until(lambda: ended(process.popen, signal.SIGINT))
        assert process.popen.returncode == 128 + signal.SIGINT
        wait_until(lambda: not any(child.is_running() for child in children))


def test_a_paused_server_is_not_drained(endless_model: Path) -> None:
    """Its requests cannot end while the engine is paused."""
    with tok_serve(endless_model, "--enable-rl") as process, process.post(LONG) as stream:
        assert stream.readline().startswith(b"data: ")
        pause = urllib.request.Request(f"http://127.0.0.1:{process.port}/pause?mode=keep", b"", method="POST")
        with urllib.request.urlopen(pause, timeout=PATIENCE) as answer:
            assert json.load(answer) == {"status": "paused"}
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(PATIENCE / 2) == 0
        *_, last = events(stream)
        assert json.loads(last)["error"]["type"] == "server_error"


def ended(popen: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Send the signal once more and return whether the process has ended."""
    popen.send_signal(number)
    return popen.poll() is not None


def test_sigterm_during_startup_stops_the_server(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "tiny")
    port = free_port()
    (weights := next(model.glob("*.safetensors"))).rename(tmp_path / "weights")
    os.mkfifo(weights)  # the worker blocks, because nothing writes to the FIFO
    arguments = ["serve", str(model), "--port", str(port), "--device", "cpu"]
    with subprocess.Popen([*TOK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as popen:
        try:
            wait_until(lambda: answers(port))
            assert status(port, "/v1/models") == status(port, "/v1/models/anything") == 503
            children = psutil.Process(popen.pid).children(recursive=True)
            popen.send_signal(signal.SIGTERM)
            output, error = popen.communicate(timeout=PATIENCE)
        finally:
            popen.kill()
    assert popen.returncode == 0
    assert b"Traceback" not in error
    assert output == b""
    wait_until(lambda: not any(child.is_running() for child in children))


def answers(port: int) -> bool:
    try:
        return status(port, "/health") > 0
    except OSError:
        return False


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_chat_command_answers_alike_by_server_and_by_local_model(tiny_model: Path, server: Server) -> None:
    said = "hello\n/reset\n\nhello\n/exit\n"
    flags = ["--temperature", "0", "--max-tokens", "8"]
    remote, local = ["--url", server.url], [str(tiny_model), "--device", "cpu"]
    printed = [chat([*where, *flags], said) for where in (remote, local)]
    assert printed[0] == printed[1]
    first, second = printed[0][: len(printed[0]) // 2], printed[0][len(printed[0]) // 2 :]
    assert first == second != ""


def chat(arguments: list[str], said: str) -> str:
    done = subprocess.run(
        [*TOK, "chat", *arguments], input=said, capture_output=True, encoding="utf-8", timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
