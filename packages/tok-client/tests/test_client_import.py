"""Importing the package is cheap, and its public names are those it means to have."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

import pytest

import tok_client
from tok_client import types

IMPORT = "import sys; import tok_client, tok_client.types; print(*sys.modules)"


def test_importing_loads_neither_an_engine_nor_the_http_library() -> None:
    shown = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in shown.stdout.split()}
    assert "tok_client" in loaded
    heavy = {"torch", "numpy", "tok_core", "tok_kernels", "tok_server", "aiohttp", "yarl", "pydantic"}
    assert not loaded & heavy


TIMED = "import time; begun = time.process_time(); import tok_client; print(time.process_time() - begun)"


def test_importing_takes_less_than_150_ms_of_processor_time() -> None:
    best = 1.0
    for _ in range(200):  # beside other processes every run is slowed, though not all alike
        shown = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True)
        best = min(best, float(shown.stdout))
        if best < 0.15:
            break
    assert best < 0.15


def test_the_only_dependencies_are_aiohttp_and_msgspec() -> None:
    assert sorted(line.partition(">")[0] for line in requires("tok-client") or []) == ["aiohttp", "msgspec"]


@pytest.mark.parametrize("module", [tok_client, types])
def test_every_public_name_exists_and_is_listed_once(module: object) -> None:
    names = getattr(module, "__all__")  # noqa: B009 - a module is an object to the type checker here
    assert len(set(names)) == len(names)
    assert all(hasattr(module, name) for name in names)


def test_a_program_that_never_closes_its_client_ends_quietly() -> None:
    code = (
        "from tok_client import APIConnectionError, Client\n"
        "client = Client('http://127.0.0.1:1/v1', max_retries=0)\n"
        "try: client.models.list()\n"
        "except APIConnectionError: print('refused')\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (run.stdout, run.stderr) == ("refused\n", "")
