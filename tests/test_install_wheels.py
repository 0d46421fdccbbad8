"""Tests that the four wheels suffice: `tok serve` answers in an environment without the workspace.

The environment has this Python, or the one that UV_PYTHON names.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from support.lockfile import constraints
from support.uv_runs import PYTHON, own_environment, run_offline_first, run_uv
from support.workspace import PACKAGES, PYTHONS, ROOT, files, uv
from tok_server.bench.flags import NO_CHECKOUT, SIMULATORS

DEADLINE = 120.0
"""Seconds for the server to be ready, and again for it to exit: a cold start on a busy machine."""
INSTALL = ROOT / "packages" / "tok-server" / "docs" / "install.md"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels and sdists of `uv build --all-packages`."""
    folder = tmp_path_factory.mktemp("dist")
    run_uv("build", "--all-packages", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A constraints file of the locked versions."""
    path = tmp_path_factory.mktemp("locked") / "constraints.txt"
    path.write_text(constraints((ROOT / "uv.lock").read_text()))
    return path


@pytest.fixture(scope="module")
def missing_cpu_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why no CPU build of torch can be fetched; "" if one can be."""
    target = str(tmp_path_factory.mktemp("none"))
    probe = [
        uv(),
        "pip",
        "install",
        "--dry-run",
        "--python",
        PYTHON,
        "--target",
        target,
        "--torch-backend",
        "cpu",
        "torch",
    ]
    done = run_offline_first(probe, cwd=Path(target), variables=local_wheels())
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


@pytest.fixture(scope="module", params=["default", "CPU only"])
def installed(request: pytest.FixtureRequest, locked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment with tok-server and its requirements in the locked versions."""
    folder = tmp_path_factory.mktemp("clean")
    if request.param == "CPU only":
        if reason := request.getfixturevalue("missing_cpu_torch"):
            pytest.skip(f"no CPU build of torch can be fetched: {reason}")
        return install_for_cpu(folder, locked)
    wheels: Path = request.getfixturevalue("wheels")
    run_uv("venv", "--python", PYTHON, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    where = ("--python", python, "--find-links", wheels, "--constraints", locked)
    # Install the wheels by path, so that no index can offer other packages of these names.
    run_uv("pip", "install", *where, *sorted(wheels.glob("*.whl")))
    return python.parent


def install_for_cpu(home: Path, locked: Path) -> Path:
    """Run the documented commands for a host without a GPU, with `home` as the home directory.

    The index of torch's CPU builds may have other versions of torch than the lock.
    """
    own = home / "constraints.txt"
    own.write_text("".join(line for line in locked.read_text().splitlines(True) if not line.startswith("torch==")))
    *commands, start = documented_commands("## Without a GPU")
    assert start == ".venv/bin/tok serve"
    commands[commands.index("uv venv")] += f" --python {PYTHON}"
    settings = {"HOME": str(home), "UV_CACHE_DIR": run_uv("cache", "dir").strip(), "UV_CONSTRAINT": str(own)}
    done = run_offline_first(["bash", "-ec", "\n".join(commands)], variables=settings | local_wheels())
    assert done.returncode == 0, done.stderr
    return home / "tok" / ".venv" / "bin"


def local_wheels() -> dict[str, str]:
    """Return the variable by which uv also takes wheels from the folder that pip does, if there is one."""
    folder = os.environ.get("PIP_FIND_LINKS")
    return {"UV_FIND_LINKS": folder} if folder else {}


def documented_commands(heading: str) -> list[str]:
    """Return the indented lines of a section of the page on installation."""
    section = INSTALL.read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^    (.+)$", section, re.MULTILINE)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_a_wheel_for_each_python(python: str, wheels: Path, locked: Path) -> None:
    where = ("--python-version", python, "--find-links", wheels, "--constraints", locked, "--only-binary", ":all:")
    (wheel,) = wheels.glob("tok_server-*.whl")
    requirements = locked.with_name("requirements.txt")
    requirements.write_text(f"tok-server @ {wheel.as_uri()}\n")
    resolved = run_uv("pip", "compile", "--no-header", *where, requirements)
    assert {"torch", "transformers", "xgrammar"} <= set(re.findall(r"^([\w-]+)==", resolved, re.MULTILINE))


def test_packages_name_the_pythons_under_which_they_are_tested() -> None:
    for package in PACKAGES:
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
        assert project["classifiers"] == [f"Programming Language :: Python :: {python}" for python in PYTHONS]
        assert project["requires-python"] == f">={PYTHONS[0]}"


def test_the_build_makes_a_wheel_of_each_package(wheels: Path) -> None:
    names = sorted(path.name.split("-")[0] for path in wheels.glob("*.whl"))
    assert names == [package.replace("-", "_") for package in PACKAGES]


def test_a_wheel_holds_its_whole_package_but_the_simulators(wheels: Path) -> None:
    simulators = tuple(f"tok_server/bench/{name}/" for name in SIMULATORS)
    for package in PACKAGES:
        module = package.replace("-", "_")
        source = ROOT / "packages" / package / "src"
        ours = {str(path.relative_to(source)) for path in files() if path.is_relative_to(source)}
        (wheel,) = wheels.glob(f"{module}-*.whl")
        held = {name for name in ZipFile(wheel).namelist() if name.startswith(f"{module}/")}
        assert held == {name for name in ours if not name.startswith(simulators)}
        assert held


def test_the_installed_packages_are_not_the_workspace(installed: Path) -> None:
    modules = [package.replace("-", "_") for package in PACKAGES]
    report = f"import {', '.join(modules)}; print(*(m.__file__ for m in ({', '.join(modules)})))"
    for path in _output(installed / "python", "-c", report).split():
        assert Path(path).is_relative_to(installed.parent)


def test_an_installation_without_a_gpu_has_no_cuda_packages(installed: Path) -> None:
    listed = re.findall(r"^([\w-]+)==", run_uv("pip", "freeze", "--python", installed / "python"), re.MULTILINE)
    gpu = {name for name in listed if name.startswith(("nvidia-", "cuda-", "flashinfer", "triton"))}
    assert "torch" in listed
    assert bool(gpu) == (installed.parent.name == "venv")


def test_the_installed_tok_command_prints_help(installed: Path) -> None:
    assert "serve" in _output(installed / "tok", "--help")


def test_the_installed_bench_help_lists_no_simulators(installed: Path) -> None:
    page = _output(installed / "tok", "bench", "--help")
    assert re.findall(r"^    (\w+)", page, re.MULTILINE) == ["offline", "serve", "kernels", "steps"]
    assert [name for name in SIMULATORS if f"tok bench {name} " in page] == []


@pytest.mark.parametrize("flags", [[], ["--workload", "decode"], ["--help"]], ids=" ".join)
@pytest.mark.parametrize("name", SIMULATORS)
def test_an_installed_simulator_says_that_it_needs_a_checkout(name: str, flags: list[str], installed: Path) -> None:
    command: list[str | Path] = [installed / "tok", "bench", name, *flags]
    done = subprocess.run(command, env=own_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tok bench {name}: error: {NO_CHECKOUT}\n"


@pytest.fixture
def server(installed: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`tok serve` of the clean environment, started in an empty folder; its output is in `out` and `err`."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        command: list[str | Path] = [installed / "tok", "serve", "--port", "0", "--device", "cpu"]
        process = subprocess.Popen(command, cwd=tmp_path, env=own_environment(), stdout=out, stderr=err)
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
    done = subprocess.run(command, env=own_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _printed(folder: Path) -> str:
    return "\n".join((folder / name).read_text() for name in ("out", "err"))
