"""Tests that the four wheels suffice: `tok serve` answers in an environment without the workspace."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from support.lockfile import constraints
from support.workspace import PACKAGES, ROOT, files, uv

DEADLINE = 120.0
"""Seconds for the server to be ready, and again for it to exit: a cold start on a busy machine."""


def run_uv(*arguments: str | Path) -> None:
    """Run uv offline from its cache, and online only if that fails."""
    command = [uv(), *map(str, arguments)]
    offline = subprocess.run([*command, "--offline"], cwd=ROOT, capture_output=True, text=True)
    if offline.returncode:
        online = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert online.returncode == 0, f"{' '.join(command)}\n{offline.stderr}\n{online.stderr}"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels and sdists of `uv build --all-packages`."""
    folder = tmp_path_factory.mktemp("dist")
    run_uv("build", "--all-packages", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment with tok-server and its requirements in the locked versions."""
    folder = tmp_path_factory.mktemp("clean")
    locked = folder / "constraints.txt"
    locked.write_text(constraints((ROOT / "uv.lock").read_text()))
    run_uv("venv", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    where = ("--python", python, "--find-links", wheels, "--constraints", locked)
    # Install the wheels by path, so that no index can offer other packages of these names.
    run_uv("pip", "install", *where, *sorted(wheels.glob("*.whl")))
    return python.parent


def test_the_build_makes_a_wheel_of_each_package(wheels: Path) -> None:
    names = sorted(path.name.split("-")[0] for path in wheels.glob("*.whl"))
    assert names == [package.replace("-", "_") for package in PACKAGES]


def test_a_wheel_holds_every_file_of_its_package(wheels: Path) -> None:
    for package in PACKAGES:
        module = package.replace("-", "_")
        source = ROOT / "packages" / package / "src"
        ours = {str(path.relative_to(source)) for path in files() if path.is_relative_to(source)}
        (wheel,) = wheels.glob(f"{module}-*.whl")
        assert ours
        assert ours - set(ZipFile(wheel).namelist()) == set()


def test_the_installed_packages_are_not_the_workspace(installed: Path) -> None:
    modules = [package.replace("-", "_") for package in PACKAGES]
    report = f"import {', '.join(modules)}; print(*(m.__file__ for m in ({', '.join(modules)})))"
    for path in _output(installed / "python", "-c", report).split():
        assert Path(path).is_relative_to(installed.parent)


def test_the_installed_tok_command_prints_help(installed: Path) -> None:
    assert "serve" in _output(installed / "tok", "--help")


@pytest.fixture
def server(installed: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`tok serve` of the clean environment, started in an empty folder; its output is in `out` and `err`."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        command: list[str | Path] = [installed / "tok", "serve", "--port", "0", "--device", "cpu"]
        process = subprocess.Popen(command, cwd=tmp_path, env=_environment(), stdout=out, stderr=err)
    yield process
    if process.poll() is None:
        process.kill()
        process.wait()


def test_an_installed_server_answers_and_ends_cleanly(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    url = _ready_url(server, tmp_path)
    _request(f"{url}/health")
    body = {"prompt": "Question: Tom has 2 apples and buys 3.", "max_tokens": 8, "temperature": 0}
    answer = json.loads(_request(f"{url}/v1/completions", body))
    assert answer["choices"][0]["text"]
    assert 1 <= answer["usage"]["completion_tokens"] <= 8

    server.send_signal(signal.SIGTERM)
    assert server.wait(DEADLINE) == 0, _printed(tmp_path)


def _ready_url(server: subprocess.Popen[bytes], folder: Path) -> str:
    """Return the address from the server's ready line."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"http://[\w.]+:\d+", (folder / "out").read_text()):
            return found[0]
        time.sleep(0.05)
    pytest.fail(f"no ready line; exit code {server.poll()}\n{_printed(folder)}")


def _request(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Return the body of a response with status 200."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=DEADLINE) as response:
        assert response.status == 200
        return bytes(response.read())


def _output(*command: str | Path) -> str:
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables that lead to the workspace's Python."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def _printed(folder: Path) -> str:
    return "\n".join((folder / name).read_text() for name in ("out", "err"))
